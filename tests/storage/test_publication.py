"""The point of no return of a commit."""

from __future__ import annotations

from gymtrio.storage.publication import Publication


def test_a_stop_before_the_point_forbids_it_for_good() -> None:
    """CTL-10."""
    publication = Publication()
    assert publication.stop()
    assert publication.stopped
    assert not publication.begin()
    assert publication.stop()


def test_a_stop_after_the_point_comes_too_late_until_it_has_ended() -> None:
    """CTL-10."""
    publication = Publication()
    assert publication.begin()
    assert not publication.stop()
    assert not publication.stopped
    publication.end()
    assert publication.ended.is_set()
    assert publication.stop()
