"""The files under cluster/: what Ray and KubeRay read in them, and that they are private."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import ray.autoscaler
from ray.autoscaler._private.util import prepare_config, validate_config

from ringray.lab.cluster import capacity
from ringray.lab.cluster.capacity import Capacity, NodeGroup
from tests.support.cluster_files import CLUSTER, LAUNCHED, read

GROWING = ("aws", "gcp", "local-autoscaling")
CHOICES = ("h100-spot", "h200")  # in place of others, so they begin without nodes
HEAD = Capacity((NodeGroup("head", {}, 1, head=True),))
GPU = {"CPU": 1.0, "GPU": 1.0}


# ray up


@pytest.mark.parametrize("name", sorted({*GROWING, *LAUNCHED}))
def test_ray_accepts_it(name: str) -> None:
    schema = json.loads(
        Path(ray.autoscaler.__file__).with_name("ray-schema.json").read_text(encoding="utf-8")
    )
    config = read(name)
    jsonschema.validate(config, schema)
    validate_config(prepare_config(config))
    with pytest.raises(jsonschema.ValidationError):  # so the schema is one that refuses
        jsonschema.validate(config | {"max_wokers": 4}, schema)


@pytest.mark.parametrize("name", GROWING)
def test_it_grows_from_a_head_without_work(name: str) -> None:
    config = read(name)
    types = config["available_node_types"]
    head = types.pop(config["head_node_type"])
    assert (head["resources"], head["max_workers"]) == ({"CPU": 0}, 0)
    assert types
    for key, given in types.items():
        assert given.get("min_workers", 0) == 0
        assert (key in CHOICES) == (given["max_workers"] == 0)
        assert given["max_workers"] <= config["max_workers"]
        assert given["resources"]["GPU"] > 0
    assert config["idle_timeout_minutes"] > 0
    offer = capacity.from_config(read(name), HEAD).ranks(GPU)
    assert offer == (4 if name == "local-autoscaling" else 2 * 8 + 2)


@pytest.mark.parametrize("name", ["aws", "gcp"])
def test_nodes_of_a_cloud_have_no_public_address(name: str) -> None:
    config = read(name)
    assert config["provider"]["use_internal_ips"] is True
    assert config["auth"]["ssh_proxy_use_node_id"] is True
    for kind, given in config["available_node_types"].items():
        node = given["node_config"]
        if name == "aws":  # a group that Ray makes itself lets everybody try SSH
            cards = node.get("NetworkInterfaces")
            places = [(card["SubnetId"], card["Groups"]) for card in cards or ()]
            own = {"SubnetIds", "SecurityGroupIds"} & node.keys()
            assert (len(own), bool(places)) in ((2, False), (0, True)), kind  # Ray refuses both
            assert not any(card.get("AssociatePublicIpAddress") for card in cards or ())
        else:
            assert all("accessConfigs" not in one for one in node["networkInterfaces"])


@pytest.mark.parametrize("name", LAUNCHED)
def test_a_launched_cluster_is_private(name: str) -> None:
    config = read(name)
    (start,) = (line for line in config["head_start_ray_commands"] if "--head" in line)
    assert "--dashboard-host=127.0.0.1" in start
    assert "--num-cpus=0" in start
    started = [
        line
        for key in ("head_start_ray_commands", "worker_start_ray_commands")
        for line in config[key]
        if " start " in line
    ]
    assert len(started) == 2
    assert all(re.search(r"(^|; )RAY_AUTH_MODE=token ", line) for line in started)
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert "0.0.0.0" not in (CLUSTER / f"{name}.yaml").read_text()
