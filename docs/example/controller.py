"""Checkpoint the rollouts of the example deployment from a trio program.

First `mkdir -p /tmp/gymtrio-checkpoints` and `gymtrio up docs/example/deployment.yaml`, then, from the
top of the repository, `python docs/example/controller.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import trio

import gymtrio
from gymtrio.serving.client import ServerClient
from gymtrio.serving.deployment import DeploymentDirectory
from gymtrio.serving.pool import open_pool

HERE = Path(__file__).parent
ROWS = HERE.parent.parent / "servers/resources/data/counter/example.jsonl"


async def main() -> None:
    deployment = gymtrio.load_deployment(HERE / "deployment.yaml")
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    running = {gymtrio.RolloutId(f"task-{number}"): row for number, row in enumerate(rows)}
    async with (
        gymtrio.open_controller(deployment) as gym,
        open_pool(deployment.client) as pool,
        trio.open_nursery() as nursery,
    ):
        client = ServerClient(DeploymentDirectory(deployment), pool, deployment.client)

        async def roll_out(rollout_id: gymtrio.RolloutId, row: dict[str, object]) -> None:
            body = {
                "episode_id": {"rollout_id": rollout_id, "attempt": 0},
                "task": {"task_id": {"taskset": "counter", "task_id": "0"}, "task_input": row},
            }
            reply = await client.request("environment", "POST", "/run", json=body)
            result = reply.raise_for_status().json()["result"]
            del running[rollout_id]
            print(rollout_id, "reward", result["reward"])

        for rollout_id, row in list(running.items()):
            nursery.start_soon(roll_out, rollout_id, row)

        await trio.sleep(2)
        name = gymtrio.CheckpointId(f"step-{int(trio.current_time())}")
        where = f"/tmp/gymtrio-checkpoints/{name}"
        async with gym.checkpoint(name, where, timeout_s=30) as held:
            unfinished = [gymtrio.EpisodeId(rollout_id) for rollout_id in running]
            await held.commit(unfinished)
            # Publish while it is proven that nobody has let go: here, by writing down its name.
            await held.prove_held()
            print("checkpoint of", *unfinished, "in", where)


if __name__ == "__main__":
    trio.run(main)
