"""Several hosts save and load together: whatever their names stand for, and when the network between them fails."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.harness.hosts import Cluster, why_no_cluster
from tests.harness.ranks import run_program
from tests.harness.torch_versions import needs_lazy_connections

_WHY_NOT = why_no_cluster()
pytestmark = pytest.mark.skipif(_WHY_NOT != "", reason=_WHY_NOT)

_SAVE_AND_LOAD = """
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
robust_dcp.save(state(1), checkpoint_id=f"{path}/1", timeout_seconds=30)
robust_dcp.async_save(state(2), checkpoint_id=f"{path}/2", timeout_seconds=30).result()
loaded = {"shared": torch.zeros(1000), f"own{(rank + 1) % size}": torch.zeros(1000)}
robust_dcp.load(loaded, checkpoint_id=f"{path}/2", timeout_seconds=30)
assert loaded["shared"][0] == 2 and loaded[f"own{(rank + 1) % size}"][0] == 2 + (rank + 1) % size
print("all is well", int(total), flush=True)
"""

_LOSE_A_DRIVE = """
import shutil
report = robust_dcp.save(
    state(3), storage_writer=robust_dcp.RobustWriter(f"{path}/3", parity_nodes=2), timeout_seconds=30
)
robust_dcp.finish_async_saves()
assert report.protection == "any 1 of 2 nodes", report.protection
assert os.path.exists(f"{path}/2/.metadata")
for lost in (0, 2):  # ranks on different hosts
    if rank == lost:
        shutil.rmtree(f"{path}/3")
    dist.barrier()
    loaded = {f"own{rank}": torch.zeros(1000)}
    robust_dcp.load(loaded, checkpoint_id=f"{path}/3", timeout_seconds=30)
    assert loaded[f"own{rank}"][0] == 3 + rank and os.path.exists(f"{path}/3/.metadata")
    dist.barrier()
"""

# The store alone is used, and no collective of torch, which looks for its own address.
_WITHOUT_COLLECTIVES = """
store = store_of_rank_0()
join_by(store)
os.environ["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "").replace("ib0", "" if rank else "ib0")
try:
    robust_dcp.save(state(1), checkpoint_id=f"{path}/1", timeout_seconds=20)
    print("all is well", flush=True)
finally:  # rank 0 hosts the store, and stays until nobody needs it
    stay_until_all_are_done(store)
"""


CASES: dict[str, tuple[int, int, bool, str | None, str, int, str]] = {
    # hosts, ranks, whether they have IPv6 only, the interface that is asked for, what runs, its exit code, its words
    "the interface of the variable": (2, 4, False, "eth0", _SAVE_AND_LOAD, 0, "all is well 4"),
    "the address by which hosts reach the store": (3, 3, False, None, _WITHOUT_COLLECTIVES, 0, "all is well"),
    "IPv6 only": (2, 2, True, None, _WITHOUT_COLLECTIVES, 0, "all is well"),
    "the first of several interfaces": (2, 2, False, "eth0,eth1", _WITHOUT_COLLECTIVES, 0, "all is well"),
    "no such interface": (2, 2, False, "ib0", _WITHOUT_COLLECTIVES, 1, "has no interface 'ib0': it has eth0, eth1, lo"),
    "an interface that joins no hosts": (2, 2, False, "lo", _WITHOUT_COLLECTIVES, 1, "GLOO_SOCKET_IFNAME"),
    "an interface of another network": (2, 2, False, "eth1", _WITHOUT_COLLECTIVES, 1, "GLOO_SOCKET_IFNAME"),
}


@pytest.mark.parametrize(
    "case", [*list(CASES)[:-1], pytest.param("an interface of another network", marks=needs_lazy_connections)]
)
def test_hosts_whose_names_stand_for_127_0_1_1_find_each_other_or_say_what_is_wrong(case: str, tmp_path: Path) -> None:
    n_hosts, size, ipv6, interface, script, exitcode, words = CASES[case]
    with Cluster(n_hosts, ipv6=ipv6) as cluster:
        env = cluster.env(GLOO_SOCKET_IFNAME=interface)
        ended = run_program(script, tmp_path, size=size, become_host=cluster.host_of(size // n_hosts), env=env)
    assert all(each.exitcode == exitcode and words in each.output for each in ended)


def test_a_cable_that_is_out_for_two_seconds_is_waited_for_and_a_host_that_stays_cut_off_is_named(
    tmp_path: Path,
) -> None:
    """And its ranks save again when it is back."""
    script = """
    dist.init_process_group("gloo")
    def reach(place):
        open(f"{path}/{place}{rank}", "w").close()
        while not os.path.exists(f"{path}/after {place}"):
            channel.note_progress()
            time.sleep(0.05)
    robust_dcp.save(state(0), checkpoint_id=f"{path}/0", timeout_seconds=30)
    channel = robust_dcp.Channel.for_group(operation="work", timeout_seconds=30)
    channel.barrier("while the cable is out", lambda: reach("ready"))
    robust_dcp.save(state(1), checkpoint_id=f"{path}/1", timeout_seconds=30)
    reach("saved")
    try:
        robust_dcp.save(state(2), checkpoint_id=f"{path}/2", timeout_seconds=4)
    except robust_dcp.ExchangeError as error:
        print("named", error.ranks, flush=True)
    reach("told")
    robust_dcp.save(state(7), checkpoint_id=f"{path}/7", timeout_seconds=60)
    print("saved again", flush=True)
    """
    with Cluster(3) as cluster:
        checkpoints = tmp_path / "checkpoint"

        def await_all(place: str) -> None:
            _await(*(checkpoints / f"{place}{rank}" for rank in range(3)))

        def pull() -> None:
            await_all("ready")
            cluster.plug(2, into_network=False)
            time.sleep(2)
            cluster.plug(2, into_network=True)
            (checkpoints / "after ready").touch()
            await_all("saved")
            cluster.plug(2, into_network=False)
            (checkpoints / "after saved").touch()
            await_all("told")
            cluster.plug(2, into_network=True)
            (checkpoints / "after told").touch()

        env = cluster.env(GLOO_SOCKET_IFNAME="eth0")
        with ThreadPoolExecutor(1) as meanwhile:
            meanwhile.submit(pull)
            ended = run_program(script, tmp_path, size=3, become_host=cluster.host_of(1), env=env)
    assert all("named [2]" in each.output for each in ended[:2])
    assert all(each.exitcode == 0 and "saved again" in each.output for each in ended)


def test_a_firewall_that_drops_is_named_and_the_ranks_save_once_it_is_open(tmp_path: Path) -> None:
    """Hosts 2 and 3, which are neighbours in the tree, reach the store and all other hosts, but not each other."""
    script = """
    store = store_of_rank_0()
    join_by(store)
    began = time.monotonic()
    try:
        robust_dcp.save(state(1), checkpoint_id=f"{path}/1", timeout_seconds=8)
    except robust_dcp.ExchangeTimeout as error:
        print("named", error.missing_ranks, "after", time.monotonic() - began, error, flush=True)
    open(f"{path}/named{rank}", "w").close()
    while not os.path.exists(f"{path}/open"):
        time.sleep(0.05)
    robust_dcp.save(state(2), checkpoint_id=f"{path}/2", timeout_seconds=60)
    print("all is well", flush=True)
    stay_until_all_are_done(store)
    """
    with Cluster(4) as cluster:
        checkpoints = tmp_path / "checkpoint"
        checkpoints.mkdir()
        cluster.filter(2, 3)

        def open_it() -> None:
            _await(*(checkpoints / f"named{rank}" for rank in range(4)))
            cluster.filter(2, 3, drops=False)
            (checkpoints / "open").touch()

        with ThreadPoolExecutor(1) as meanwhile:
            meanwhile.submit(open_it)
            ended = run_program(script, tmp_path, size=4, become_host=cluster.host_of(1), env=cluster.env())
    for each in ended:
        assert each.exitcode == 0 and "all is well" in each.output
        named, _, rest = each.output.partition("named ")[2].partition(" after ")
        assert named in ("[2]", "[3]"), named
        assert float(rest.split()[0]) < 90


def test_over_slow_links_hosts_wait_for_each_other(tmp_path: Path) -> None:
    """A message takes longer than the timeout, in both directions, and beats wait behind it. But its pieces arrive."""
    script = """
    dist.init_process_group("gloo")
    robust_dcp.save(state(1), checkpoint_id=f"{path}/1", timeout_seconds=40)
    channel = robust_dcp.Channel.for_group(operation="send", timeout_seconds=3)
    import msgspec
    class Text(msgspec.Struct):
        data: bytes
    import random
    data = random.Random(1).randbytes(16 << 20)
    for send in (channel.broadcast, channel.gather):
        began = time.monotonic()
        got = send("over the slow link", lambda: Text(data), Text)
        assert time.monotonic() - began > 4
        assert send == channel.gather or got.data == data
    print("all is well", flush=True)
    dist.barrier()
    """
    with Cluster(2) as cluster:
        for host in range(2):
            cluster.slow_down(host, "20mbit")
        env = cluster.env(GLOO_SOCKET_IFNAME="eth0")
        ended = run_program(script, tmp_path, size=2, become_host=cluster.host_of(1), env=env)
    assert all(each.exitcode == 0 and "all is well" in each.output for each in ended)


def test_hosts_with_drives_of_their_own_load_what_lies_on_the_other_and_outlive_each_drive(tmp_path: Path) -> None:
    script = _SAVE_AND_LOAD.replace('print("all', _LOSE_A_DRIVE + 'print("all')
    drives = tmp_path / "checkpoint"
    drives.mkdir()
    with Cluster(2) as cluster:
        env = cluster.env(GLOO_SOCKET_IFNAME="eth0")
        ended = run_program(script, tmp_path, size=4, become_host=cluster.host_of(2, drives=drives), env=env)
    assert all(each.exitcode == 0 and "all is well 4" in each.output for each in ended)
    assert not list(drives.iterdir()), "each host wrote to its own drive"


def _await(*paths: Path) -> None:
    until = time.monotonic() + 100
    while not all(path.exists() for path in paths) and time.monotonic() < until:
        time.sleep(0.05)
