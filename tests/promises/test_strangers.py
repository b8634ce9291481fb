"""Strangers on the network, who connect to the ports of the ranks and send what they like, fail no save."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.promises.programs import run_program

_SCRIPT = """
import random, socket, struct, threading
from torch.testing._internal.distributed import fake_pg
from robust_dcp.comm.frames import Frame, Kind, operation_id, phase_id

store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), size, is_master=rank == 0)
dist.init_process_group("fake", store=store, rank=rank, world_size=size)  # so the ports are those of our own group
ended, sent = threading.Event(), set()


def ports():
    own = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass  # closed meanwhile
    lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}").readlines()[1:]]
    listening = {int(line[1].split(":")[1], 16) for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in own}
    return listening - {int(os.environ["MASTER_PORT"])}


def disturb():
    rng = random.Random(rank)
    name = f"save {path}/0"
    guess = Frame(Kind.GONE, operation_id(name), 0, 0, phase_id("agree"), body=struct.pack("<2I", 1, 0)).encode()
    while not ended.wait(0.02):
        for port in ports():
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=1) as stranger:
                    stranger.sendall(WHAT)
                    sent.add(port)
            except OSError:
                pass


threading.Thread(target=disturb, daemon=True).start()
for turn in range(5):
    robust_dcp.save(state(turn), checkpoint_id=f"{path}/{turn}", timeout_seconds=30)
    time.sleep(0.1)
ended.set()
print("saved", len(sent) > 0, flush=True)
store.add("done", 1)
while rank == 0 and store.add("done", 0) < size:
    time.sleep(0.05)
"""


@pytest.mark.parametrize(
    "what",
    ["b''", "rng.randbytes(200)", "struct.pack('<q', rng.randrange(8)) + guess", "b'GET / HTTP/1.1\\r\\n\\r\\n'"],
    ids=["nothing", "noise", "guessed frames", "a browser"],
)
def test_a_stranger_that_connects_and_sends_what_it_likes_fails_no_save(tmp_path: Path, what: str) -> None:
    ended = run_program(_SCRIPT.replace("WHAT", what), tmp_path, size=3)
    assert all(each.exitcode == 0 and "saved True" in each.output for each in ended)
