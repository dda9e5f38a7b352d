#!/usr/bin/env bash
# Trains on several machines; run it on each of them with the same arguments:
#
#   NNODES=2 RDZV_ENDPOINT=host0:29400 RDZV_ID=run7 launch/multinode.sh stage=finetune model=llava_v1_5_7b ...
#
#   NNODES          number of machines; 3:4 continues with three if one of four is lost, and takes a fourth again
#   RDZV_ENDPOINT   host:port of one of them, reachable from all; torchrun meets there
#   RDZV_ID         name of the run: the same on all machines, new for every run
#   NODE_RANK       optional; 0 on the machine that RDZV_ENDPOINT names, another number elsewhere: needed where that
#                   machine cannot recognise itself by that name, and so would not open the port
#   JOIN_TIMEOUT    optional, default 600; seconds to wait for the other machines; with NODE_RANK above 0 also the
#                   seconds to wait for the first machine to open the port (60 without NODE_RANK)
#   LOCAL_ADDR      optional; name or address by which the other machines reach this one, default: the address that
#                   faces RDZV_ENDPOINT; gloo uses that address's interface unless GLOO_SOCKET_IFNAME is set
#   NPROC_PER_NODE  optional; ranks on this machine, default: one per GPU
#   MAX_RESTARTS    optional, default 3; how often torchrun restarts ranks that died
#   LOG_DIR         optional, default outputs/logs/RDZV_ID; output of every rank; the terminal shows local rank 0
#
# torchrun numbers the machines itself, so rank 0, which logs the steps, may be on any of them.
# output_dir must be a folder that all machines share. Exit codes: docs/running.md.
set -euo pipefail

# shellcheck source=launch/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

need() {
    [[ -n "${!1:-}" ]] || die "$1 is not set: $2. Example:" \
        "NNODES=2 RDZV_ENDPOINT=host0:29400 RDZV_ID=run7 launch/multinode.sh stage=finetune"
}
need NNODES "how many machines take part"
need RDZV_ENDPOINT "host:port of one of the machines, reachable from all"
need RDZV_ID "a name that is the same on all machines, and new for every run"
[[ "$NNODES" =~ ^[1-9][0-9]*(:[1-9][0-9]*)?$ ]] || die "NNODES=$NNODES must be a number of machines"
[[ "$RDZV_ENDPOINT" =~ ^.+:0*([1-9][0-9]{0,4})$ && ${BASH_REMATCH[1]} -le 65535 ]] ||
    die "RDZV_ENDPOINT=$RDZV_ENDPOINT must be host:port, with a port from 1 to 65535"
[[ "${NODE_RANK:-0}" =~ ^(0|[1-9][0-9]*)$ ]] ||
    die "NODE_RANK=$NODE_RANK must be a number: 0 on the machine of RDZV_ENDPOINT"
[[ "$NNODES" == *:* || "${NODE_RANK:-0}" -lt "$NNODES" ]] || # with a range, one more machine waits as a spare
    die "NODE_RANK=$NODE_RANK must be less than the number of machines, NNODES=$NNODES: they count from 0"
[[ "${JOIN_TIMEOUT:-600}" =~ ^[1-9][0-9]*$ ]] || die "JOIN_TIMEOUT=$JOIN_TIMEOUT must be a number of seconds"
use_venv

# await_endpoint SECONDS: waits until the machine that RDZV_ENDPOINT names has opened the port.
await_endpoint() {
    local host="${RDZV_ENDPOINT%:*}" port="${RDZV_ENDPOINT##*:}" until=$((SECONDS + $1)) told=""
    host="${host#[}"
    host="${host%]}" # of an IPv6 address
    # shellcheck disable=SC2016  # the inner shell expands it; a host that drops packets would hold it for minutes
    until timeout 5 bash -c 'exec 3<>"/dev/tcp/$0/$1"' "$host" "$port" 2>/dev/null; do
        if [[ $SECONDS -ge $until ]]; then
            say "error: RDZV_ENDPOINT=$RDZV_ENDPOINT did not answer for $1 seconds. Has launch/multinode.sh been started" \
                "there with NODE_RANK=0, does the name resolve here (getent hosts $host), and is the port open?"
            exit 5
        fi
        [[ -n "$told" ]] || say "waiting for $RDZV_ENDPOINT"
        told=yes
        sleep 1
    done
}

# Prints the address of this machine that faces RDZV_ENDPOINT, and its interface. Prints nothing if the name does not
# resolve, or resolves to a loopback address (some systems list their own name so in /etc/hosts). Without an address
# torchrun and gloo use what this machine's own name resolves to, which other machines often cannot reach.
facing_endpoint() {
    python -c '
import fcntl, ipaddress, socket, struct, sys
host, port = sys.argv[1].strip("[]"), int(sys.argv[2])
try:
    family, kind, proto, _, at = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as way:
        way.connect(at)  # sends nothing
        own = way.getsockname()[0]
    if ipaddress.ip_address(own).is_loopback and own != host and host != "localhost":
        sys.exit()
    names = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                asked = fcntl.ioctl(any_socket, 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
            except OSError:  # without an address
                continue
            names += [name] if socket.inet_ntoa(asked[20:24]) == own else []
    print(own, *names[:1])
except (OSError, ValueError):
    pass' "${RDZV_ENDPOINT%:*}" "${RDZV_ENDPOINT##*:}"
}

meeting="join_timeout=${JOIN_TIMEOUT:-600}"
if [[ -n "${NODE_RANK:-}" ]]; then
    meeting+=",is_host=$([[ "$NODE_RANK" -eq 0 ]] && echo true || echo false)"
fi
ranks="$(ranks_here)"
read -r own interface <<<"$(facing_endpoint)" || true
own="${LOCAL_ADDR:-${own:-}}"
if [[ -n "${interface:-}" && -z "${GLOO_SOCKET_IFNAME:-}" && -z "${LOCAL_ADDR:-}" ]]; then
    export GLOO_SOCKET_IFNAME="$interface"
fi
trap 'exit 75' TERM
[[ "${NODE_RANK:-0}" -eq 0 ]] || await_endpoint "${JOIN_TIMEOUT:-600}"
exec python -m llava_fsdp train \
    --nnodes "$NNODES" --nproc-per-node "$ranks" \
    --rdzv-backend c10d --rdzv-endpoint "$RDZV_ENDPOINT" --rdzv-id "$RDZV_ID" --rdzv-conf "$meeting" ${own:+--local-addr "$own"} \
    --max-restarts "${MAX_RESTARTS:-3}" \
    --log-dir "${LOG_DIR:-outputs/logs/$RDZV_ID}" --tee 3 --local-ranks-filter 0 \
    "$@"
