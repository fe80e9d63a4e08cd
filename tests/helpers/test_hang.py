"""A test that hangs fails alone, and its failure says where its tasks wait."""

from __future__ import annotations

from pathlib import Path

import pytest

HANGING = """
    import signal

    import trio
    from hypothesis import given, strategies

    async def waits_for_what_never_comes():
        await trio.Event().wait()

    async def test_waits(autojump_clock):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(waits_for_what_never_comes)

    @given(strategies.integers())
    async def test_property_waits(number):
        if number > 1:
            await trio.sleep_forever()

    def test_spins():
        while True:
            signal.pause()

    async def test_goes_on():
        await trio.lowlevel.checkpoint()
"""


@pytest.fixture(autouse=True)
def _import_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def _run(pytester: pytest.Pytester, source: str) -> pytest.RunResult:
    pytester.makepyfile(source)
    return pytester.runpytest_subprocess(
        "-p", "tests.helpers.hang", "-o", "trio_mode=true", "--timeout=0.5"
    )


def test_each_hanging_test_fails_alone_and_shows_its_tasks(pytester: pytest.Pytester) -> None:
    result = _run(pytester, HANGING)
    result.assert_outcomes(failed=3, passed=1)
    result.stdout.fnmatch_lines(["*waits_for_what_never_comes: await trio.Event().wait()*"])
    result.stdout.fnmatch_lines(["*Hung: the test had not ended after 0.5 s*"])


def test_the_session_stops_at_a_test_that_cannot_be_cancelled(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GYMTRIO_TEST_CLEANUP_S", "0.5")
    result = _run(
        pytester,
        """
        import trio

        async def test_shielded():
            with trio.CancelScope(shield=True):
                await trio.sleep_forever()
        """,
    )
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*test_shielded hung and could not be cancelled*"])
