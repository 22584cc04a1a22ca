"""The nodes of the cluster that grows and shrinks on one machine: Ray's fake provider with a folder
per node for the source of jobs, and an address of the loopback per node.

Ray's provider gives all nodes the head's folder, in which the agents of two nodes remove and unpack
the same job's source at the same time; and the head's address, so that they are one machine.
"""

from __future__ import annotations

import functools
import itertools
import uuid
from typing import Any

from ray._private import parameter
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider

_counts = itertools.count()


class LocalNodes(FakeMultiNodeProvider):
    """The provider that an autoscaler's configuration names as ``provider.module``."""

    def _create_node_with_resources_and_labels(self, *given: Any) -> None:
        apart = f"runtime_resources/{uuid.uuid4().hex}"
        with self.lock:
            original = parameter.RayParams
            parameter.RayParams = functools.partial(
                original,
                runtime_env_dir_name=apart,
                node_ip_address=f"127.0.0.{2 + next(_counts) % 250}",
            )
            try:
                super()._create_node_with_resources_and_labels(*given)
            finally:
                parameter.RayParams = original
