"""A request router for Ray Serve that sends each call to the replica that the call names.

Serve's own routers choose a replica by the lengths of queues when a call is sent. Here `Placement` has chosen
the replica before, by the contents of the replicas' prefix trees, and has reserved the work there.
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from ramify.ray import listed  # the module: Ray Serve sends this class, with copies of what it names


class PlacedRequestRouter(RequestRouter):  # type: ignore[misc]
    """A router that sends each call to the replica named in the call's first argument."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Choose the replica that the call names.

        If the replica has ended, the call fails with `ReplicaGone`.
        """
        if pending_request is None:
            return [candidate_replicas]
        name = str(pending_request.args[0])
        found = listed.choose(name, candidate_replicas)
        if found is not None:
            return [[found]]
        if not pending_request.future.done():
            pending_request.future.set_exception(listed.ReplicaGone(name))
        return [candidate_replicas]  # the choice has no effect: the call is already done

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take Serve's new list. Replicas that drain are kept, for messages about their requests."""
        names = [listed.name_of(one) for one in replicas]
        super().update_replicas([*replicas, *listed.here.kept(self.curr_replicas.values(), names)])
        listed.here.update(names)
