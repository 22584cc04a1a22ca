"""The nodes of the cluster that grows and shrinks on one machine: Ray's fake provider, but for one
thing that jobs need.

Ray's provider puts all nodes into the head's session folder, where the agents of two nodes remove
and unpack the same job's source from under each other. Here each node has a folder of its own for
that.
"""

from __future__ import annotations

import functools
import uuid
from typing import Any

from ray._private import parameter
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider


class LocalNodes(FakeMultiNodeProvider):
    """For ``provider.module`` of an autoscaler's configuration."""

    def _create_node_with_resources_and_labels(self, *given: Any) -> None:
        apart = f"runtime_resources/{uuid.uuid4().hex}"
        with self.lock:
            original = parameter.RayParams
            parameter.RayParams = functools.partial(original, runtime_env_dir_name=apart)
            try:
                super()._create_node_with_resources_and_labels(*given)
            finally:
                parameter.RayParams = original
