"""The rings that fit on a cluster, and the reasons why others do not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING

from ringray.lab.cluster.capacity import Capacity, Placement, from_nodes
from ringray.lab.plan.pruning import Reason, unfit
from ringray.lab.trial.config import TrialConfig

if TYPE_CHECKING:
    from ringray.lab.plan.plan import Plan


MOST_RINGS = 64  # rings side by side, of which each has a thread


class Cluster:
    """A connected Ray.

    ``local``: started by this process, for this process alone; ``present``: its nodes; ``reach``:
    returns the nodes that it can grow to, None if that cannot be known. It is called once, and only
    if ``present`` does not answer the question.
    """

    def __init__(
        self, local: bool, present: Capacity, reach: Callable[[], Capacity | None] | None = None
    ) -> None:
        self.local = local
        self.present = present
        self._ask = reach or (lambda: present)

    @cached_property
    def reach(self) -> Capacity | None:
        """The nodes that there can be; None if that cannot be known."""
        return self._ask()

    def device(self, wanted: str) -> str:
        """Returns cpu or cuda; ``auto`` means GPUs if there are any, or can be."""
        if wanted != "auto":
            return wanted
        if self.present.has("GPU"):
            return "cuda"
        return "cuda" if self.reach is not None and self.reach.has("GPU") else "cpu"

    def placement(self, config: TrialConfig) -> Placement:
        """Returns the needs of each rank of the trial's ring."""
        device = self.device(config.ring.device)
        # On the embedded Ray ranks may share cores: CPU rings are for trying things out.
        cpus = 1.0 if self.local or device == "cuda" else float(config.ring.threads)
        bundle = (("CPU", cpus), ("GPU", 1.0)) if device == "cuda" else (("CPU", cpus),)
        return Placement(device, config.ring.placement.replace("-", "_").upper(), bundle)

    def needs_exact_size(self, config: TrialConfig) -> bool:
        """Returns whether a ring must not have more ranks than the trial: idle GPUs cost, and so do
        nodes that a cluster would give back."""
        return self.device(config.ring.device) == "cuda" or self.reach != self.present

    def most_rings(self, config: TrialConfig) -> float:
        """Returns how many rings like the trial's can work side by side, each on machines of its
        own; of GPU rings as many as they have room on one. Infinite without a limit."""
        placement, size = self.placement(config), config.ring.size
        offer = self.present if self.reach is None else self.reach
        if self.local or placement.strategy == "SPREAD":
            return 1
        nodes: dict[int, float] = {}  # by the ranks of each
        for group in offer.groups:
            ranks = group.ranks(dict(placement.bundle))
            count = group.limit if group.head else min(group.limit, offer.worker_limit)
            nodes[ranks] = nodes.get(ranks, 0) + count
        rings = 0.0
        for ranks, count in nodes.items():
            # Either whole rings lie on a node, or a ring takes several whole nodes.
            if ranks >= size and placement.strategy != "STRICT_SPREAD":
                rings += count * (ranks // size if placement.device == "cuda" else 1)
            elif ranks and placement.strategy != "STRICT_PACK":
                each = -(-size // ranks) if placement.strategy == "PACK" else size
                rings += count if count == math.inf else count // each
        return rings

    def side_by_side(self, plan: Plan) -> int:
        """Returns how many rings of a plan work at the same time.

        Raises:
            SpecError: the spec wants more than fit.
        """
        configs, wanted = [trial.config for trial in plan.runnable], plan.spec.ring.concurrent
        most = max(map(self.most_rings, configs), default=1.0)
        settled = self.reach == self.present and not self.present.has("GPU")
        if most > 1 and settled and len(self._hosts()) == 1:
            most = 1
        if wanted is not None and wanted > max(1, most):
            text = f"got {wanted}, expected at most {max(1, most):g}: more rings do not fit here"
            raise plan.spec.error("ring.concurrent", text)
        return int(max(1, min(most, len(configs), wanted or MOST_RINGS)))

    def _hosts(self) -> set[str]:
        import ray

        return {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}

    def fits_without(self, config: TrialConfig, nodes: Iterable[str]) -> bool:
        """Returns whether the trial's ring fits on the present nodes without some (Ray's ids)."""
        import ray

        lost = set(nodes)
        there = from_nodes(node for node in ray.nodes() if node["NodeID"] not in lost)
        return self._largest(there, config) >= config.ring.size

    def refusal(self, config: TrialConfig) -> Reason | None:
        """Returns the reason if the trial can never run here, else None."""
        size = config.ring.size
        if self._largest(self.present, config) < size:
            offer = self.reach
            if offer is not None and self._largest(offer, config) < size:
                return self._too_much(offer, config)
        return unfit(config, self.device(config.ring.device))

    def _largest(self, offer: Capacity, config: TrialConfig) -> float:
        placement = self.placement(config)
        return offer.ranks(dict(placement.bundle), placement.strategy)

    def _too_much(self, offer: Capacity, config: TrialConfig) -> Reason:
        placement, size = self.placement(config), config.ring.size
        where = "this machine can hold" if self.local else "the cluster can offer"
        if placement.device == "cuda" and not offer.has("GPU"):
            return Reason(
                "ring.device",
                f"cuda needs GPUs, {where} none: {offer}; take device: cpu, or name another "
                "cluster: --address",
            )
        need = " and ".join(f"{amount * size:g} {name}s" for name, amount in placement.bundle)
        how = {"STRICT_PACK": " on one node", "STRICT_SPREAD": " on as many nodes"}
        largest = self._largest(offer, config)
        return Reason(
            "ring.size",
            f"a ring of {size} needs {need}{how.get(placement.strategy, '')}, {where} "
            f"{f'rings of up to {largest:g}' if largest else 'no such rank'}: {offer}; "
            "shrink ring.size, or name a larger cluster: --address",
        )
