"""A synchronous parameter server whose shards live with the workers: push each chunk to its server, pull it back.

Source: Li et al., *Scaling distributed machine learning with the parameter server*, 2014, with as many servers as
workers; the same messages are the direct reduce-scatter and all-gather.
"""

from __future__ import annotations

from lit_parallel.schedules.schedule import Schedule, Send


def sharded(world_size: int) -> Schedule:
    """Rank c serves chunk c.

    Cost: 2 steps; each rank sends and receives 2(P-1) messages, 2(P-1)/P of the tensor.
    """
    # Each server is listed with its nearest worker first: at any moment the ranks then talk to different peers.
    pairs = [(rank, (rank + distance) % world_size) for distance in range(1, world_size) for rank in range(world_size)]
    return Schedule(
        "sharded",
        world_size,
        num_chunks=world_size,
        make_steps=lambda: iter(
            [
                tuple(Send(worker, server, chunk=server, reduce=True) for worker, server in pairs),  # push
                tuple(Send(server, worker, chunk=server, reduce=False) for server, worker in pairs),  # pull
            ]
        ),
    )
