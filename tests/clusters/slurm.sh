#!/usr/bin/env bash
# A real Slurm (controller + N node daemons) on one Debian host, for integration tests.
#   slurm.sh [start]   install if missing, write slurm.conf, start daemons, wait until idle
#   slurm.sh stop      end only the daemons this script started (by pid file)
#   slurm.sh status    daemons and sinfo
# Environment:
#   SLURM_NODES=1|2|..   number of node daemons (default 1; >1 = virtual nodes on this host)
#   SLURM_CPUS_PER_NODE  CPUs each node claims (default: all; may exceed real ones with >1 node)
#   SLURM_MEM_PER_NODE   MiB each node claims (default: 80% of RAM divided by nodes)
#   SLURM_FAKE_GPUS      gpu GRES per node with fake device files (default 0); sets CUDA_VISIBLE_DEVICES
#   SLURM_NODE_TIMEOUT   seconds without contact before a node is down (default 60)
#   SLURM_MEM_KILL=1     kill jobs over their --mem (polled every 2 s; otherwise --mem is not enforced)
#   SLURM_STATE          state, logs, pid files (default /var/lib/stretto-slurm)
# Needs root. No systemd, no cgroups, no slurmdbd.
set -euo pipefail
STATE=${SLURM_STATE:-/var/lib/stretto-slurm}
NODES=${SLURM_NODES:-1}
GPUS=${SLURM_FAKE_GPUS:-0}
CONF=/etc/slurm/slurm.conf
MARK='# written by tests/clusters/slurm.sh'
MUNGE_SOCK=$STATE/munge/munge.socket
HOST=$(hostname -s)
ADDR=$(hostname -I | awk '{print $1}')   # off loopback, as between real machines
say() { echo "slurm.sh: $*" >&2; }

alive() {  # alive PIDFILE COMM: the recorded pid lives and is that program (pids get reused)
  local p; p=$(cat "$1" 2>/dev/null) || return 1
  [ -n "$p" ] && [ -d "/proc/$p" ] && [ "$(cat "/proc/$p/comm" 2>/dev/null)" = "$2" ]
}
end() {    # end PIDFILE COMM
  alive "$1" "$2" || { rm -f "$1"; return 0; }
  local p; p=$(cat "$1"); kill "$p" 2>/dev/null || true
  for _ in $(seq 50); do [ -d "/proc/$p" ] || break; sleep 0.1; done
  [ -d "/proc/$p" ] && { say "$2 $p did not stop, sending KILL"; kill -9 "$p" 2>/dev/null || true; }
  rm -f "$1"
}
stop() {
  if alive "$STATE/slurmctld.pid" slurmctld; then   # running tasks would outlive the daemons
    timeout 10 scancel --state=RUNNING --signal=KILL --full 2>/dev/null || true
    timeout 10 scancel --user="$(id -un)" 2>/dev/null || true
    for _ in $(seq 30); do [ -z "$(timeout 5 squeue -h 2>/dev/null)" ] && break; sleep 0.5; done
  fi
  local f
  for f in "$STATE"/slurmd.*.pid; do [ -e "$f" ] && end "$f" slurmd; done
  end "$STATE/slurmctld.pid" slurmctld
  end "$STATE/munge/munged.pid" munged
}
install() {
  local need=0 c
  for c in slurmctld slurmd srun sbatch munged; do command -v $c >/dev/null || need=1; done
  [ $need = 0 ] && return 0
  say "installing slurm-wlm and munge"
  export DEBIAN_FRONTEND=noninteractive
  apt-get install -y --no-install-recommends slurm-wlm munge >"$STATE/apt.log" 2>&1 ||
    { apt-get update >>"$STATE/apt.log" 2>&1 &&
      apt-get install -y --no-install-recommends slurm-wlm munge >>"$STATE/apt.log" 2>&1; } ||
    { tail -20 "$STATE/apt.log" >&2; return 1; }
}
config() {
  if [ -e $CONF ] && ! grep -qF "$MARK" $CONF; then say "$CONF exists and is not mine; refusing"; return 1; fi
  local cpus mem i gres=
  mkdir -p /etc/slurm
  cpus=${SLURM_CPUS_PER_NODE:-$(nproc --all)}
  mem=${SLURM_MEM_PER_NODE:-$(awk -v n="$NODES" '/MemTotal/{print int($2/1024*0.8/n)}' /proc/meminfo)}
  if [ "$GPUS" -gt 0 ]; then
    gres="Gres=gpu:$GPUS"
    for i in $(seq 0 $((GPUS - 1))); do [ -e "$STATE/fakegpu$i" ] || mknod "$STATE/fakegpu$i" c 1 3; done
    printf '%s\nName=gpu File=%s/fakegpu[0-%d]\n' "$MARK" "$STATE" $((GPUS - 1)) >/etc/slurm/gres.conf
  else
    { [ -e /etc/slurm/gres.conf ] && grep -qF "$MARK" /etc/slurm/gres.conf && rm /etc/slurm/gres.conf; } || true
  fi
  {
    cat <<CONF
$MARK
ClusterName=stretto
SlurmctldHost=$HOST(127.0.0.1)
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$MUNGE_SOCK
StateSaveLocation=$STATE/ctld
SlurmdSpoolDir=$STATE/spool.%n
SlurmctldPidFile=$STATE/slurmctld.pid
SlurmdPidFile=$STATE/slurmd.%n.pid
SlurmctldLogFile=$STATE/slurmctld.log
SlurmdLogFile=$STATE/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=256
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=5,bf_interval=5
ReturnToService=2
MailProg=/bin/true
MinJobAge=3600
KillWait=5
InactiveLimit=0
SlurmctldTimeout=30
SlurmdTimeout=${SLURM_NODE_TIMEOUT:-60}
JobRequeue=1
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=2
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$STATE/jobcomp.txt
CONF
    [ -z "$gres" ] || echo "GresTypes=gpu"
    [ "${SLURM_MEM_KILL:-0}" = 0 ] || echo "JobAcctGatherParams=OverMemoryKill"
    if [ "$NODES" = 1 ]; then
      echo "NodeName=$HOST NodeAddr=${ADDR:-127.0.0.1} Port=16818 CPUs=$cpus RealMemory=$mem $gres State=UNKNOWN"
    else
      for i in $(seq "$NODES"); do
        echo "NodeName=node$i NodeHostname=$HOST NodeAddr=${ADDR:-127.0.0.1} Port=$((16818 + i)) CPUs=$cpus RealMemory=$mem $gres State=UNKNOWN"
      done
    fi
    echo "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO"
  } >"$STATE/slurm.conf.new"
  if ! cmp -s "$STATE/slurm.conf.new" $CONF 2>/dev/null; then
    alive "$STATE/slurmctld.pid" slurmctld && { say "configuration changed: restarting"; stop; }
    rm -rf "$STATE/ctld"; mkdir -p "$STATE/ctld"     # node layout changed: start from a clean state
    mkdir -p /etc/slurm; cp "$STATE/slurm.conf.new" $CONF
  fi
}
start() {
  [ "$(id -u)" = 0 ] || { say "needs root"; return 1; }
  mkdir -p "$STATE/ctld" "$STATE/munge"; chmod 755 "$STATE"
  install; config
  chown munge: "$STATE/munge"; chmod 755 "$STATE/munge"
  [ -s /etc/munge/munge.key ] || runuser -u munge -- mungekey --create
  alive "$STATE/munge/munged.pid" munged || runuser -u munge -- munged --socket="$MUNGE_SOCK" \
    --pid-file="$STATE/munge/munged.pid" --log-file="$STATE/munge/munged.log" --seed-file="$STATE/munge/munged.seed"
  alive "$STATE/slurmctld.pid" slurmctld || slurmctld
  local i names=$HOST n
  [ "$NODES" = 1 ] || names=$(seq -f 'node%g' "$NODES")
  for n in $names; do
    mkdir -p "$STATE/spool.$n"
    alive "$STATE/slurmd.$n.pid" slurmd || slurmd -N "$n"
  done
  for i in $(seq 60); do
    [ "$(sinfo -h -N -o %t 2>/dev/null | grep -cxE 'idle|mix|alloc')" = "$NODES" ] && { sinfo -N -l; return 0; }
    sleep 0.5
  done
  say "nodes not idle after 30 s; see $STATE/*.log"; sinfo -N -l || true; tail -5 "$STATE"/*.log >&2; return 1
}
case ${1:-start} in
  start) start ;;
  stop) stop ;;
  status) for f in "$STATE"/slurmctld.pid "$STATE"/slurmd.*.pid "$STATE"/munge/munged.pid; do
            [ -e "$f" ] && echo "$f $(cat "$f") $(cat "/proc/$(cat "$f")/comm" 2>/dev/null || echo gone)"; done
          timeout 10 sinfo -N -l ;;
  *) echo "usage: $0 [start|stop|status]" >&2; exit 2 ;;
esac
