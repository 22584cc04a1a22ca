#!/bin/bash
# One sweep on a Slurm allocation, whose every node is a node of Ray until the sweep ends:
#   source .venv/bin/activate      # ringray's environment, in a folder that all nodes see
#   sbatch --nodes=4 --gpus-per-node=8 cluster/slurm.sh SPEC [OPTION OF `ringray run` ...]
# `--nodes` and `--gpus-per-node` decide the size; add --account, --partition, --time. The job's exit
# code is the sweep's; its log is ringray-JOBID.log. Results are in $RINGRAY_HOME (~/.ringray) of the
# first node, so keep that in a folder that all nodes see.
#
# Private: no dashboard, free ports, and Ray's token on every connection. The token is made for the job
# and travels over srun's standard input alone: it stands in no file and on no command line.
# Slurm must resolve node names to addresses by which nodes reach each other; RINGRAY_INTERFACE=ib0
# names another interface of theirs. Racks are the leaf switches, where topology.conf tells them.
#
# RINGRAY_CONTAINER is put before every `python`, for nodes whose ringray is in an image:
#   RINGRAY_CONTAINER='apptainer exec --nv ringray.sif' sbatch --nodes=4 ... cluster/slurm.sh SPEC
# with `apptainer build ringray.sif docker-daemon:REGISTRY/ringray:0.1.0`. The container must share the node's
# network, processes, /tmp and /dev/shm, as Apptainer's do. Those of `enroot start` need
# --mount /tmp:/tmp --mount /dev/shm:/dev/shm; pyxis's options of srun do not reach the driver.
#
# NCCL takes InfiniBand by libibverbs of the node or the image, and TCP without. RDMA pins memory: give
# slurmd LimitMEMLOCK=infinity. Tasks have slurmd's limits where slurm.conf says
# PropagateResourceLimitsExcept=MEMLOCK, otherwise those of the shell that calls sbatch.
#
# `scancel JOBID`, a preemption and the end of --time end the sweep as Ctrl-C does. A preempted job that
# starts again, and any later one with this SPEC, continues it.
#SBATCH --job-name=ringray --output=ringray-%j.log --open-mode=append --requeue
#SBATCH --ntasks-per-node=1 --exclusive --mem=0
#SBATCH --signal=B:TERM@120
set -u

JOIN_S=${RINGRAY_JOIN_S:-180}  # seconds for all nodes to join Ray
END_S=60                       # seconds for all nodes to leave it

fail() {
  echo "cluster/slurm.sh: error: $1" >&2
  exit "${2:-2}"
}

address() {  # this node's, on $RINGRAY_INTERFACE or else on its way to node $1
  "${python[@]}" -c '
import os, psutil, socket, sys
if name := os.environ.get("RINGRAY_INTERFACE"):
    found = psutil.net_if_addrs().get(name, [])
    print(next(one.address for one in found if one.family == socket.AF_INET))
else:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((sys.argv[1], 9))
        print(way.getsockname()[0])' "$1"
}

raise() {  # the soft limit of option $1 to $2, or to the hard one where that is lower; never down
  local soft hard
  soft=$(ulimit -S "$1")
  hard=$(ulimit -H "$1")
  [[ $hard == unlimited ]] || { [[ $2 != unlimited ]] && ((hard >= $2)); } || set -- "$1" "$hard"
  [[ $soft == unlimited ]] || { [[ $2 != unlimited ]] && ((soft >= $2)); } || ulimit -S "$1" "$2"
}

limits() {  # of a node: files for Ray's sockets, KiB of stack for NCCL, pinned memory for RDMA by $1
  raise -n 65536
  raise -s 65536
  raise -l unlimited
  if [[ $(ulimit -l) != unlimited && -n $(ls "$1" 2>/dev/null) ]]; then
    echo "${SLURMD_NODENAME-a node} may pin $(ulimit -l) KiB of memory, and RDMA needs no limit:" \
      "LimitMEMLOCK=infinity for slurmd, or NCCL_IB_DISABLE=1 for TCP" >&2
  fi
}

node() {  # one node of Ray, which ends when its standard input does
  trap : TERM INT HUP  # Slurm sends them to all tasks: the sweep ends first, its nodes after it
  limits /sys/class/infiniband
  local head port client rack ray lifeline options
  read -r RAY_AUTH_TOKEN head port client
  export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
  unset RAY_ADDRESS
  folder=$(umask 077 && mktemp -d "/tmp/rr-$SLURM_JOB_ID-XXXXXX") || return  # short: sockets lie in it
  trap 'rm -rf "$folder"' EXIT
  options=(
    --temp-dir="$folder/r" --num-cpus="$SLURM_CPUS_ON_NODE" --num-gpus="${SLURM_GPUS_ON_NODE:-0}"
    --object-store-memory=1000000000 --min-worker-port=0 --max-worker-port=0
    --dashboard-agent-listen-port=0 --disable-usage-stats --block
  )
  rack=${SLURM_TOPOLOGY_ADDR-}
  rack=${rack%"${SLURMD_NODENAME-}"}  # "spine.leaf1." is left of "spine.leaf1.node7"
  rack=${rack%.}
  [[ -z $rack ]] || options+=(--labels="ringray.io/rack=${rack##*.}")
  exec 4<&0
  cat <&4 >/dev/null &
  lifeline=$!
  if [[ $SLURM_PROCID == 0 ]]; then
    options+=(--head --node-ip-address="$head" --port="$port" --ray-client-server-port="$client"
      --include-dashboard=false)
  else
    until (: 3<>"/dev/tcp/$head/$port") 2>/dev/null; do
      kill -0 $lifeline 2>/dev/null || return
      sleep 0.5
    done
    options+=(--node-ip-address="$(address "$head")" --address="$head:$port")
  fi
  while kill -0 $lifeline 2>/dev/null; do  # on a busy machine Ray may give up and need another start
    setsid "${python[@]}" -m ray.scripts.scripts start "${options[@]}" </dev/null >"$folder/log" 2>&1 4<&- &
    ray=$!
    while kill -0 $ray 2>/dev/null && kill -0 $lifeline 2>/dev/null; do wait -n $ray $lifeline; done
    kill -0 $lifeline 2>/dev/null || break
    echo "Ray has ended on ${SLURMD_NODENAME-a node}, and starts again:" >&2
    tail -n 3 "$folder/log" >&2
    sleep 1
  done
  kill -TERM $ray 2>/dev/null
  while kill -0 $ray 2>/dev/null; do wait $ray; done
}

# Runs a command in a session of its own, and passes signals on: Slurm may send one to all processes
# of a job, and ringray takes a second one as the order to end at once.
run() {
  setsid "$@" </dev/null 3>&- &
  child=$!
  trap 'kill -TERM $child 2>/dev/null' TERM INT HUP
  while kill -0 $child 2>/dev/null; do wait $child; done
  wait $child
}

end() {
  trap '' TERM INT HUP
  exec 3>&-  # the nodes' standard input
  timeout $END_S tail --pid="$nodes" -f /dev/null || kill -KILL "$nodes"
}

[[ -n ${SLURM_JOB_ID-} ]] || fail "not in a Slurm job; expected: sbatch --nodes=N cluster/slurm.sh SPEC"
(($#)) || fail "no spec; expected: sbatch --nodes=N cluster/slurm.sh SPEC [OPTION ...]"
read -ra python <<<"${RINGRAY_CONTAINER-} python"
"${python[@]}" -c 'import psutil, ray, ringray.lab.cluster.fit' 2>/dev/null ||
  fail "no ringray[lab] for ${python[*]} ($(command -v "${python[0]}" || echo 'a missing command')); activate its environment before sbatch, or name its image: RINGRAY_CONTAINER"
"${python[@]}" -m ringray validate "$1" >/dev/null || exit

"${python[@]}" -c '
import os, re, sys
from ringray.lab.cluster.capacity import Capacity, NodeGroup
from ringray.lab.cluster.fit import Cluster
from ringray.lab.plan.plan import build
from ringray.lab.specs import model
gpus = float(os.environ.get("SLURM_GPUS_ON_NODE") or 0)
groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ["SLURM_JOB_CPUS_PER_NODE"])
nodes = [NodeGroup("node", {"CPU": float(cpus), "GPU": gpus}, int(n or 1)) for cpus, n in groups]
there = Cluster(False, Capacity(tuple(nodes)))
reasons = [there.refusal(one.config) for one in build(model.load(sys.argv[1]), everything=True).runnable]
if all(reasons):
    sys.exit(str(reasons[0]).partition(";")[0])
' "$1" || fail "no ring of $1 fits the allocation; shrink ring.size, or ask for more: sbatch --nodes=N"

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=127.0.0.1
if ((${#hosts[@]} > 1)); then
  head=$(address "${hosts[1]}") || fail "no address of this node by which ${hosts[1]} reaches it" 1
fi
read -r token port client < <("${python[@]}" -c '
import secrets, socket
opened = [socket.create_server(("", 0)) for _ in range(2)]
print(secrets.token_hex(32), *(one.getsockname()[1] for one in opened))')

exec 3> >(exec setsid srun --nodes="${#hosts[@]}" --ntasks="${#hosts[@]}" --ntasks-per-node=1 \
  --export=ALL --overlap --cpu-bind=none --kill-on-bad-exit=0 --unbuffered \
  bash -c "$(declare -p python; declare -f address raise limits node); node")
nodes=$!
trap end EXIT
echo "$token $head $port $client" >&3
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$token

run "${python[@]}" -c '
import contextlib, os, socket, sys, time
from ringray.lab.cluster import ray_private
host, port, wanted, srun, patience = sys.argv[1], *map(int, sys.argv[2:])
until, there = time.monotonic() + patience, 0
while there < wanted:
    if time.monotonic() > until or not os.path.exists(f"/proc/{srun}"):
        sys.exit(f"{there} of {wanted} nodes joined Ray in {patience} s")
    time.sleep(0.5)
    with contextlib.suppress(OSError):
        socket.create_connection((host, port), timeout=2).close()
        if reply := ray_private.cluster_status(f"{host}:{port}", 2):
            nodes = reply.cluster_resource_state.node_states
            there = sum(node.status != ray_private.DEAD for node in nodes)
' "$head" "$port" "${#hosts[@]}" "$nodes" "$JOIN_S" || fail "Ray did not start; see above" 1

run "${python[@]}" -m ringray run "$@" --address "$head:$port"
