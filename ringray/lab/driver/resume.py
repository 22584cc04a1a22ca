"""The state of a sweep before its first trial runs: which measurements stand, and why others do
not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ringray.base import provenance, units
from ringray.base.errors import PlaceError
from ringray.lab.cluster.fit import Cluster
from ringray.lab.driver.schedule import Schedule
from ringray.lab.plan.forecast import BEATEN
from ringray.lab.plan.plan import Plan
from ringray.lab.plan.pruning import Reason
from ringray.lab.plan.trial import Trial, cost_dict
from ringray.lab.store.store import Store
from ringray.lab.trial import faults
from ringray.lab.trial.outcome import NOT_REQUESTED, NOT_TRIED, Kept, TrialInfo, TrialRow


@dataclass(frozen=True)
class Resume:
    """The state of a sweep before its first trial runs. All mappings have trial keys."""

    plan: Plan
    rows: Mapping[str, TrialRow]  # what the store holds
    done: Mapping[str, TrialRow]  # rows that stand
    earlier: Mapping[str, int]  # numbers of those among them that are not current in the store
    not_requested: frozenset[str] | None  # left out by a completed search, None of any other
    to_do: bool  # a trial is left to measure
    pruned: Mapping[str, str]  # reasons of trials that are not measured
    again: bool = False  # no row stands because the user asks so

    @classmethod
    def of(
        cls, plan: Plan, store: Store, environment: dict[str, Any], again: bool = False
    ) -> Resume:
        """Returns what the plan and the store say, before a cluster is connected.

        A trial's current measurement stands, else the newest earlier one of the present identity.
        ``again``: none stands.
        """
        rows = {row.key: row for row in store.trials(plan.digest)}
        done, earlier = ({}, {}) if again else _standing(plan, store, rows, environment)
        not_requested = None
        if rows and not again and store.find(plan.digest).status in ("complete", "failed"):
            left_out = {NOT_REQUESTED} if plan.everything else {NOT_REQUESTED, str(BEATEN)}
            not_requested = frozenset(key for key, row in rows.items() if row.reason in left_out)
        schedule = Schedule(plan, {}, done, not_requested)
        to_do = schedule.next() is not None
        measured = {key for key, row in rows.items() if row.status not in (None, "pruned")}
        pruned = {t.key: str(t.pruned) for t in plan.trials if t.pruned and t.key not in measured}
        if not to_do:
            pruned |= {trial.key: NOT_REQUESTED for trial in schedule.not_requested()}
        return cls(plan, rows, done, earlier, not_requested, to_do, pruned, again)

    def on(self, cluster: Cluster) -> Resume:
        """Returns the same with the trials pruned that ``cluster`` can never run.

        Raises:
            PlaceError: it can run none of them.
        """
        return replace(self, pruned={**self.pruned, **_refusals(self.plan, cluster)})

    def schedule(self) -> Schedule:
        """Returns the search over the trials that are left."""
        return Schedule(self.plan, self.pruned, self.done, self.not_requested)

    def infos(self) -> list[TrialInfo]:
        """Returns all trials as the store takes them."""
        pruned = {key: row.reason or "" for key, row in self.done.items() if row.status == "pruned"}
        reasons = {**self.pruned, **pruned}
        # A measurement keeps the prediction that was made before it.
        before = {key: row.predicted for key, row in self.done.items() if row.metrics}
        infos = []
        for t in self.plan.trials:
            predicted = before.get(t.key, cost_dict(t))
            flat, reason = t.config.as_dict(), reasons.get(t.key)
            infos.append(TrialInfo(t.key, t.index, flat, predicted, reason))
        return infos

    def present(self, environment: dict[str, Any]) -> list[TrialRow]:
        """Returns the rows of the present identity, and those of pruned points, by time."""
        now = provenance.measured_parts(environment)
        rows = {**self.rows, **self.done}.values()

        def is_present(row: TrialRow) -> bool:
            parts = provenance.measured_parts(row.environment or {})
            return row.status == "pruned" or parts == now

        return sorted(filter(is_present, rows), key=lambda row: row.ended or 0.0)

    def provenance(self, environment: dict[str, Any]) -> list[str]:
        """Says which measurements are taken from before, and why the others are made again."""
        commits = Counter(provenance.commit(row.environment) for row in self.done.values())
        lines = [
            f"taken from before: {units.plural(count, 'trial')}"
            f"{f' of commit {commit}' if commit else ''}, the same code in ranks"
            for commit, count in commits.items()
        ]
        keys = [t.key for t in self.plan.runnable if t.key in self.rows and t.key not in self.done]
        stale = [row for key in keys if (row := self.rows[key]).status not in (None, "pruned")]
        why = (_why_again(row, environment) for row in stale)
        reasons = Counter(["--again"] * len(stale) if self.again else why)
        return lines + [
            f"to be measured again: {units.plural(count, 'trial')}, {why}"
            for why, count in reasons.items()
        ]


def _standing(
    plan: Plan, store: Store, rows: Mapping[str, TrialRow], environment: dict[str, Any]
) -> tuple[dict[str, TrialRow], dict[str, int]]:
    """Returns the measurements that stand and the numbers of those that are not current."""
    history: dict[str, list[Kept]] = {}
    for record in sorted(store.history(plan.digest), key=lambda had: had.trial.ended or 0.0):
        history.setdefault(record.trial.key, []).insert(0, record)
    done, earlier = {}, {}
    for trial in plan.runnable:
        current = [Kept(rows[trial.key], 0)] if trial.key in rows else []
        for record in (*current, *history.get(trial.key, ())):
            if _stands(trial, record.trial, plan, environment):
                done[trial.key] = record.trial
                if record.seq:
                    earlier[trial.key] = record.seq
                break
    return done, earlier


def _why_again(row: TrialRow, environment: dict[str, Any]) -> str:
    """Says why a recorded measurement does not stand."""
    then, now = map(provenance.measured_parts, (row.environment or {}, environment))
    if then["kernels"] != now["kernels"]:
        commit = provenance.commit(row.environment)
        return "measured with other code in ranks" + (f" at commit {commit}" if commit else "")
    for part in ("hardware", "versions"):
        names = [name for name, value in now[part].items() if then[part].get(name) != value]
        if names:
            return f"measured with other {part} ({', '.join(names)})"
    failed = row.status in ("failed", "timeout")
    return f"{row.status} before" if failed else "measured under other limits or tuned choices"


def _stands(trial: Trial, row: TrialRow, plan: Plan, environment: dict[str, Any]) -> bool:
    """Tells whether a trial need not run: it ended well, with this code on this hardware.

    A trial that a cluster refused is measured on one that can hold it.
    """
    own = row.environment or {}
    return (
        (row.status in ("ok", "oom") or (row.reason or "").startswith(NOT_TRIED))
        and row.point == trial.point(environment, own.get("chosen"))
        and not faults.stale(own.get("faults", ()), plan.spec.limits.rank_memory)
    )


def _refusals(plan: Plan, cluster: Cluster) -> dict[str, str]:
    """Returns the trials that this cluster can never run, and why; PlaceError if it runs none."""
    independent_ranks = plan.spec.trial_kind.independent_ranks
    device, wrong = cluster.device(plan.spec.ring.device), None
    if independent_ranks and device != plan.device:
        wrong = Reason(
            "ring.device",
            f"got auto, which is {device} on this cluster and {plan.device} where the search was "
            "planned; name it",
        )
    # Ranks that work alone are placed one by one, and all of them at the same time.
    size = {"ring_size": plan.spec.sweep("ring", "size")[0]} if independent_ranks else {}
    refusals = {
        trial.key: wrong or cluster.refusal(trial.config.changed(**size)) for trial in plan.runnable
    }
    refused = {key: reason for key, reason in refusals.items() if reason is not None}
    if len(refused) == len(plan.runnable):
        reason = next(iter(refused.values()))
        raise PlaceError(str(plan.spec.error(reason.field, reason.text)))
    return {key: str(reason) for key, reason in refused.items()}
