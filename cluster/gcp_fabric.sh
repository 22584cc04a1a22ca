# shellcheck shell=sh
# The variables by which NCCL takes the fabric of a node of cluster/gcp.yaml, which sources this file
# before Ray starts. On machines without a fabric it changes nothing, and NCCL takes TCP.
if [ -n "$(ls -A /sys/class/infiniband 2>/dev/null)" ]; then # A3 Ultra, A4: RDMA, by Google's gIB
  # shellcheck source=/dev/null
  . /usr/local/gib/scripts/set_nccl_env.sh
  export LD_LIBRARY_PATH="/usr/local/gib/lib64:${LD_LIBRARY_PATH-}"
elif [ -d /run/tcpx ]; then # A3 High whose receive daemon (tcpgpudmarxd) runs: GPUDirect-TCPX
  export LD_LIBRARY_PATH="/var/lib/tcpx/lib64:${LD_LIBRARY_PATH-}"
  export NCCL_SOCKET_IFNAME=enp0s12 NCCL_GPUDIRECTTCPX_CTRL_DEV=enp0s12
  export NCCL_GPUDIRECTTCPX_SOCKET_IFNAME=enp6s0,enp12s0,enp134s0,enp140s0
  export NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX=/run/tcpx NCCL_GPUDIRECTTCPX_FORCE_ACK=0
  export NCCL_GPUDIRECTTCPX_PROGRAM_FLOW_STEERING_WAIT_MICROS=1000000
  # Cores of the socket to which each interface is attached: some send, others receive.
  export NCCL_GPUDIRECTTCPX_TX_BINDINGS='enp6s0:8-21,112-125;enp12s0:8-21,112-125;enp134s0:60-73,164-177;enp140s0:60-73,164-177'
  export NCCL_GPUDIRECTTCPX_RX_BINDINGS='enp6s0:22-35,126-139;enp12s0:22-35,126-139;enp134s0:74-87,178-191;enp140s0:74-87,178-191'
  export NCCL_CROSS_NIC=0 NCCL_NET_GDR_LEVEL=PIX NCCL_P2P_PXN_LEVEL=0
  export NCCL_NSOCKS_PERTHREAD=4 NCCL_SOCKET_NTHREADS=1
fi
