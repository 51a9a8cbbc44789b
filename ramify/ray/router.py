"""Ray Serve's request router: a call goes to the replica that it names.

Serve's own routers choose when a call is sent, from the lengths of queues. Here `Placement` has chosen
before, from what the replicas' trees hold, and has reserved the work.
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from ramify.ray import listed  # the module: Ray Serve sends this class, with copies of what it names


class PlacedRequestRouter(RequestRouter):  # type: ignore[misc]
    """Sends each call to the replica that its first argument names."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Choose the named replica. If it has ended, the call fails with `ReplicaGone`."""
        if pending_request is None:
            return [candidate_replicas]
        name = str(pending_request.args[0])
        found = listed.choose(name, candidate_replicas)
        if found is not None:
            return [[found]]
        if not pending_request.future.done():
            pending_request.future.set_exception(listed.ReplicaGone(name))
        return [candidate_replicas]  # any of them: Serve sees first that the call is done

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take Serve's new list. Draining replicas stay, for messages about their requests."""
        names = [listed.name_of(one) for one in replicas]
        super().update_replicas([*replicas, *listed.here.kept(self.curr_replicas.values(), names)])
        listed.here.update(names)
