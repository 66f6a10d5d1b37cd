#!/usr/bin/env bash
# Run a command on a smaller machine: with at most so much memory (page cache included) and a drive
# that reads at most so fast. The limits are the kernel's (control groups v1 or v2; needs root).
#
#   limited.sh [--memory 1300M] [--read-mbps 400] [--read-iops 2000] [--readahead-kib 128]
#              [--path FOLDER | --device vda] [--keep-cache] -- COMMAND [ARG...]
#
# --memory         bytes with K, M, G (powers of 1024); swap is forbidden
# --read-mbps      10^6 bytes a second;  --read-iops: read operations a second
# --readahead-kib  the drive's readahead while COMMAND runs; the old value is put back afterwards
# --path           a file or folder on the drive that is limited (default: the current folder)
# --device         the drive itself, by its name in /sys/class/block
# --keep-cache     do not drop the page cache of the machine before COMMAND starts
# The exit status is COMMAND's; 2 for a usage error or a limit that cannot be set.
set -euo pipefail

die() { echo "limited.sh: $*" >&2; exit 2; }

memory="" mbps="" iops="" readahead="" device="" path=. drop=1
while [ $# -gt 0 ]; do
  case $1 in
    --memory) memory=${2:?}; shift 2 ;;
    --read-mbps) mbps=${2:?}; shift 2 ;;
    --read-iops) iops=${2:?}; shift 2 ;;
    --readahead-kib) readahead=${2:?}; shift 2 ;;
    --path) path=${2:?}; shift 2 ;;
    --device) device=${2:?}; shift 2 ;;
    --keep-cache) drop=0; shift ;;
    -h | --help) sed -n '2,/^set /{/^#/p}' "$0"; exit 0 ;;
    --) shift; break ;;
    *) die "unknown option $1 (see --help)" ;;
  esac
done
[ $# -gt 0 ] || die "no command after -- (see --help)"
for number in "$mbps" "$iops" "$readahead"; do
  [[ -z $number || $number =~ ^[1-9][0-9]*$ ]] || die "not a whole number: $number"
done
[ "$(id -u)" = 0 ] || die "control groups need root"

if [ -n "$memory" ]; then
  memory=$(numfmt --from=iec -- "${memory%B}" 2>/dev/null) || die "--memory takes 600M, 2G or bytes"
fi
whole=""
if [ -n "$mbps$iops$readahead" ]; then
  if [ -z "$device" ]; then
    device=$(findmnt -no SOURCE -T "$path") || die "cannot find the drive of $path; use --device"
    device=$(basename "$(readlink -f "${device%%[*}")")
  fi
  [ -e "/sys/class/block/$device/dev" ] || die "no drive $device in /sys/class/block"
  # Limits and readahead belong to the whole drive, not to a partition of it.
  whole=$(readlink -f "/sys/class/block/$device")
  [ ! -e "$whole/partition" ] || whole=$(dirname "$whole")
  number=$(cat "$whole/dev")
fi

groups=() old=""
finish() {
  [ -z "$old" ] || echo "$old" >"$whole/queue/read_ahead_kb"
  for group in "${groups[@]}"; do rmdir "$group" 2>/dev/null || true; done
}
trap finish EXIT

name=limited.$$
root=/sys/fs/cgroup
add() { mkdir "$1" || die "cannot make the control group $1"; groups+=("$1"); }
put() { echo "$1" >"$2" || die "the kernel refused $1 in $2"; }
if [ -e $root/cgroup.controllers ]; then
  if [ -n "$memory$mbps$iops" ]; then
    put "+memory +io" $root/cgroup.subtree_control
    add $root/$name
    if [ -n "$memory" ]; then
      put "$memory" $root/$name/memory.max
      [ ! -e $root/$name/memory.swap.max ] || put 0 $root/$name/memory.swap.max
    fi
    limit=${mbps:+ rbps=$((${mbps:-0} * 1000000))}${iops:+ riops=$iops}
    [ -z "$limit" ] || put "$number$limit" $root/$name/io.max
  fi
else
  if [ -n "$memory" ]; then
    add $root/memory/$name
    put "$memory" $root/memory/$name/memory.limit_in_bytes
    put 0 $root/memory/$name/memory.swappiness
  fi
  if [ -n "$mbps$iops" ]; then
    add $root/blkio/$name
    for kind in ${mbps:+bps:$((${mbps:-0} * 1000000))} ${iops:+iops:$iops}; do
      put "$number ${kind#*:}" "$root/blkio/$name/blkio.throttle.read_${kind%%:*}_device"
    done
  fi
fi
if [ -n "$readahead" ]; then
  old=$(cat "$whole/queue/read_ahead_kb")
  put "$readahead" "$whole/queue/read_ahead_kb"
fi
if [ $drop = 1 ]; then
  sync
  echo 3 >/proc/sys/vm/drop_caches || echo "limited.sh: the page cache was not dropped" >&2
fi
# The command runs beside this shell, not instead of it, so that the trap can clean up.
status=0
(
  for group in "${groups[@]}"; do echo $BASHPID >"$group/cgroup.procs"; done
  trap - EXIT
  exec "$@"
) || status=$?
exit $status
