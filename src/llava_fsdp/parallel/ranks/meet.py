"""Let the ranks of a run meet in a store at MASTER_ADDR:MASTER_PORT, within one time limit, and name those that do not
come. torch.distributed alone would wait for several timeouts one after the other, and its errors name no rank.

In this module, `until` is the time, by the monotonic clock, at which this rank gives up, and `size` is the number of
ranks as this rank knows it.
"""

import os
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from llava_fsdp.runtime.errors import CommunicationError, ConfigError
from llava_fsdp.runtime.launch import attempt
from llava_fsdp.runtime.process.process_end import has_ended
from llava_fsdp.runtime.text.log import log

MET = "met"
"""Text that the last rank to come writes into the store. A rank that gives up writes its error message instead."""
ARRIVED, VERDICT_READ = "come", "told"
"""Keys in the store: numbers of the ranks that have reached it, and that have read from it whether the run begins."""
POLL_SECONDS = 0.2
"""Seconds between two looks into the store, and between two attempts to reach it."""
READERS_SECONDS = 3.0
"""Most seconds for which rank 0, with which the store ends, lets other ranks read why it gives up."""
TELL = 60.0
"""Seconds of waiting after which a rank logs for whom it waits, and between two such messages."""
MOST_NAMED = 8
"""Maximum number of missing ranks that an error message names."""
CURE = (
    "is every rank started, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE, and may the machines reach each "
    "other there? comm.init_timeout allows more time"
)


def meet(rank: int, size: int, until: float) -> dist.Store:
    """Wait until all ranks of a run have come to a common store, at most until the time `until` (of `time.monotonic`),
    and return the store. Its keys have a prefix that is new after every restart, because torchrun's store outlives a
    restart and contains the addresses of dead ranks (pytorch#135712).

    In torchrun's store the prefix is the number of restarts; a store that rank 0 opens is new at every start. Each node
    counts its own restarts, so that the numbers differ if nodes come and go. In that case torchrun must use a new store
    for every start, which it does with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.

    Raises:
        CommunicationError: the store cannot be reached or a rank has not come in time, two processes have the same
            rank, or ranks disagree about the number of ranks.
        ConfigError: MASTER_ADDR or MASTER_PORT is not set, or is not an address.
    """
    shared = uses_agent_store()  # whether the store is torchrun's
    store = open_store(rank, until) if size > 1 else dist.HashStore()
    store = dist.PrefixStore(f"attempt_{attempt() if shared else 'new'}", store)
    if size > 1:
        sign_and_wait(store, rank, size, until)
    return store


def uses_agent_store() -> bool:
    """Return whether torchrun runs the store in which the ranks meet. Otherwise rank 0 runs it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def open_store(rank: int, until: float) -> dist.Store:
    """Connect to the store in which the ranks of a run meet, before the time `until` (of `time.monotonic`). Rank 0 also
    starts it, unless torchrun does.

    Raises:
        CommunicationError: the store cannot be reached, or its port is in use.
        ConfigError: MASTER_ADDR or MASTER_PORT is not set, or is not an address.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(
            f"MASTER_ADDR={host} MASTER_PORT={port}: give the address of rank 0's machine and one of its free ports, "
            "the same to all ranks; torchrun does it by itself"
        )
    where = f"{host}:{port}"
    is_server = rank == 0 and not uses_agent_store()
    listener = None
    try:  # opened here, and not by TCPStore, for a clear error if the port is in use
        if is_server:
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            listener = socket.create_server(("", int(port)), family=family, backlog=2048, dualstack_ipv6=dual)
    except OSError as error:
        raise CommunicationError(
            f"rank 0 cannot offer {where} to the other ranks ({error.strerror}): give another MASTER_PORT"
        ) from error
    await_port(host, int(port), rank, until)
    try:
        return dist.TCPStore(
            host,
            int(port),
            is_master=is_server,
            timeout=remaining(until),
            wait_for_workers=False,
            master_listen_fd=listener.detach() if listener is not None else None,
        )
    except RuntimeError as error:
        raise CommunicationError(
            f"rank {rank} has reached {where}, but what answers there is not rank 0's store "
            f"({first_line(error)}): {CURE}"
        ) from error


def await_port(host: str, port: int, rank: int, until: float) -> None:
    """Wait until the store of the ranks accepts connections at its port, and log now and then that it does not yet.
    Raises CommunicationError if that takes until `until` (`time.monotonic`)."""
    told = time.monotonic()
    while True:
        try:
            socket.create_connection((host, port), timeout=max(POLL_SECONDS, until - time.monotonic())).close()
            return
        except (OSError, UnicodeError) as error:
            whose = "torchrun" if uses_agent_store() else "rank 0"
            reason = getattr(error, "strerror", None) or error
            text = f"rank {rank} on {socket.gethostname()} has not reached {whose} at {host}:{port} ({reason})"
            if time.monotonic() + POLL_SECONDS >= until:
                raise CommunicationError(f"{text}: {CURE}").about(rank=rank, address=f"{host}:{port}") from error
            if time.monotonic() >= told + TELL:
                told = time.monotonic()
                log().warning("waiting: %s yet", text)
        time.sleep(POLL_SECONDS)


def sign_and_wait(store: dist.Store, rank: int, size: int, until: float) -> None:
    """Write into the store that this rank has come, and wait until all ranks have come, or until the time `until`. The
    first rank that knows the outcome writes it under the key `verdict`: `MET` if all have come, else the number of the
    rank at fault and a message (`conclude`). While it waits, the lowest rank that has come logs now and then which
    ranks are missing.

    Raises:
        CommunicationError: a rank has not come in time, two processes have the same rank, or ranks disagree about the
            number of ranks. Every rank that has come raises the same message.
    """
    own_name = f"rank {rank} (process {os.getpid()} on {socket.gethostname()})"
    try:
        # each returns what is stored then: the text of the process that was first
        first = store.compare_set("size", "", f"{size} ranks says {own_name}").decode()
        holder = store.compare_set(key_of(rank), "", own_name).decode()
        if first.partition(" ")[0] != str(size):
            differ = f"the ranks disagree about their number: {first}, {size} ranks says {own_name}"
            conclude(store, f"{rank} {differ}; {CURE}")
        if holder != own_name:
            conclude(store, f"{rank} two processes have the same rank: {holder} and {own_name}; give each its own RANK")
        if store.add(ARRIVED, 1) == size:  # this rank is the last one to come
            conclude(store, MET)
        told = time.monotonic()
        while not store.check(["verdict"]):
            now = time.monotonic()
            if now >= until or now >= told + TELL:
                told, absent = now, [other for other in range(size) if not store.check([key_of(other)])]
                named = ", ".join(map(str, absent[:MOST_NAMED])) + ", ..." * (len(absent) > MOST_NAMED)
                who = f"rank{'s' * (len(absent) > 1)} {named} of {size} {'have' if absent[1:] else 'has'}"
                if now >= until:
                    conclude(store, f"{absent[0]} {who} not come to {address()}: {CURE}" if absent else MET)
                elif absent and not set(range(rank)) - set(absent):  # the first rank that has come
                    log().warning("waiting: %s not come to %s yet", who, address())
            time.sleep(POLL_SECONDS)
        verdict = store.get("verdict").decode()
        if verdict != MET:
            store.add(VERDICT_READ, 1)
            if rank == 0 and not uses_agent_store():
                await_readers(store)  # the store ends with this process, and the others must read the verdict
    except RuntimeError as error:
        raise CommunicationError(
            f"{own_name} has lost the store at {address()}, before all ranks had come: {first_line(error)}"
        ) from error
    if verdict != MET:
        culprit, _, text = verdict.partition(" ")
        raise CommunicationError(text).about(rank=int(culprit))


def conclude(store: dist.Store, verdict: str) -> None:
    """End the waiting of all ranks, unless another rank has already ended it. `verdict`: `MET`; or the number of the
    rank that caused the failure, a space, and an error message for every rank."""
    store.compare_set("verdict", "", verdict)


def await_readers(store: dist.Store) -> None:
    """Wait until all ranks that have reached the store have read from it why the run fails; at most READERS_SECONDS
    seconds. Rank 0, whose process holds the store, does this before it ends, or the others could not say why."""
    until = time.monotonic() + READERS_SECONDS
    # adding 0 reads a counter
    while store.add(VERDICT_READ, 0) < store.add(ARRIVED, 0) and time.monotonic() < until:
        time.sleep(POLL_SECONDS / 4)


def ended_ranks(store: dist.Store, size: int) -> list[tuple[int, str]]:
    """Return the numbers and names, such as `rank 3 (process 17 on HOST)`, of ranks on this machine whose processes
    have ended after they came to the store."""
    ended = []
    for rank in range(size):
        name = store.get(key_of(rank)).decode()
        pid, _, host = name.partition("(process ")[2].removesuffix(")").partition(" on ")
        if host == socket.gethostname() and has_ended(int(pid)):
            ended.append((rank, name))
    return ended


def key_of(rank: int) -> str:
    return f"rank {rank}"


def address() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def remaining(until: float) -> timedelta:
    """Return the time that is left, at least a second."""
    return timedelta(seconds=max(1.0, until - time.monotonic()))


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
