#!/usr/bin/env bash
# Two hosts on this machine: network namespaces with a cable between them. Needs root and iproute2.
#   hosts.sh up | run A|B COMMAND... | cut | mend | down
# Each host has its own addresses (10.77.0.1 and 10.77.0.2), its own shared memory, and says that it is another machine.
# The disk is that of both.
set -euo pipefail
case "$1" in
up)
  for host in A B; do ip netns add "stretto$host"; done
  ip link add cableA netns strettoA type veth peer name cableB netns strettoB
  number=1
  for host in A B; do
    ip -n "stretto$host" addr add "10.77.0.$number/24" dev "cable$host"
    ip -n "stretto$host" link set "cable$host" up
    ip -n "stretto$host" link set lo up
    number=$((number + 1))
  done ;;
run)
  host=$2
  shift 2
  # shellcheck disable=SC2016
  exec ip netns exec "stretto$host" unshare -m bash -c '
    mount -t tmpfs none /dev/shm
    echo "host-$0" > /dev/shm/machine
    mount --bind /dev/shm/machine /proc/sys/kernel/random/boot_id
    export GLOO_SOCKET_IFNAME="cable$0"
    exec "$@"' "$host" "$@" ;;
cut) ip -n strettoA link set cableA down ;;
mend) ip -n strettoA link set cableA up ;;
down) for host in A B; do ip netns del "stretto$host" 2> /dev/null || true; done ;;
esac
