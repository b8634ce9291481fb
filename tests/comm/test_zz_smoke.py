import time, os, signal
from robust_dcp.comm import Channel, Offer
from tests.comm.messages import Note
from tests.support.ranks import errors, run_ranks, values


def verbs(n):
    ch = Channel.for_group(timeout_seconds=20)
    r = ch.rank
    t = time.monotonic()
    a = ch.agree("a", lambda: Offer(bytes([r]) * 16, bytes(16), r + 1, 1))
    g = ch.gather("g", lambda: Note(r, b"x" * n), Note)
    b = ch.broadcast("b", lambda: Note(7, b"y" * n), Note)
    s = ch.scatter("s", lambda: [Note(i, b"z" * n) for i in range(ch.size)], Note)
    al = ch.all_gather("al", lambda: Note(r), Note)
    ch.barrier("z")
    dt = time.monotonic() - t
    for i in range(50):
        ch.barrier(f"b{i}")
    return (
        a,
        [x.rank for x in g] if g else None,
        b.rank,
        s.rank,
        [x.rank for x in al],
        dt,
        (time.monotonic() - t - dt) / 50,
    )


def killed():
    ch = Channel.for_group(timeout_seconds=30)
    ch.barrier("connect")
    if ch.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    t = time.monotonic()
    try:
        ch.gather("step", lambda: Note(ch.rank), Note)
    finally:
        print(time.monotonic() - t)


def late():
    ch = Channel.for_group(timeout_seconds=1.5 if ch_rank() != 2 else 40)
    if ch_rank() == 2:
        time.sleep(4)
    ch.barrier("x")


def ch_rank():
    import torch.distributed as d

    return d.get_rank()


def elsewhere():
    ch = Channel.for_group(timeout_seconds=50, operation="save 1" if ch_rank() != 2 else "load 1")
    try:
        ch.barrier("save 1: x" if ch.rank != 2 else "load 1: y")
    finally:
        Channel.for_group(timeout_seconds=20).barrier("next")


def test_smoke():
    for o in values(run_ranks(5, verbs, 3000)):
        print(o)


def test_killed():
    o = run_ranks(5, killed)
    for e in o:
        print(e.rank, e.exitcode, e.error and e.error.message, e.output[-300:])


def test_late():
    o = run_ranks(4, late)
    for e in o:
        print(e.rank, e.exitcode, e.error and e.error.message, e.output[-300:])


def test_elsewhere():
    o = run_ranks(4, elsewhere)
    for e in o:
        print(e.rank, e.exitcode, e.error and e.error.message, e.output[-300:])
