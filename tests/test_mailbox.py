"""The host side of mailboxes, over a driver whose GPUs are memory of this host."""

from typing import Any

import jax
import numpy as np
import pytest
from fake_gpu import GRANULARITY, FakeDriver, Refused
from fake_kernel import kernels, report_of
from fake_setup import FakeDevice, Registered, install

import jax_mla
from jax_mla import PeerTimeout, SetupError, UnsupportedError
from jax_mla import mailbox_layout as layout
from jax_mla.runtime.rendezvous import Meeting

DEVICES = [FakeDevice(id=10 + ordinal, local_hardware_id=ordinal) for ordinal in range(8)]
ORDINALS = np.array([[3, 1], [0, 2], [7, 6], [5, 4]])
"""Ranks by groups: neither ids nor ordinals tell ranks."""
BATCH, HEADS = 2, 3
HALF_BYTES = BATCH * 4 * HEADS * 576
MEMORY_OF_A_RANK = {"handles": 1, "ranges": 1, "mappings": 1, "device": 1, "host": 1}


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver(8)


@pytest.fixture
def registered(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Registered:
    return install(monkeypatch, driver)


def mesh_of(ordinals: Any, names: tuple[str, ...] = ("dcp", "data")) -> jax.sharding.Mesh:
    devices = [DEVICES[ordinal] for ordinal in np.ravel(ordinals)]
    return jax.sharding.Mesh(np.array(devices).reshape(np.shape(ordinals)), names)


def make(mesh: jax.sharding.Mesh | None = None, **changes: Any) -> jax_mla.DcpMailbox:
    options: dict[str, Any] = {"max_batch": BATCH, "heads": HEADS, "timeout": 1.5} | changes
    return jax_mla.DcpMailbox(mesh or mesh_of(ORDINALS), "dcp", **options)


def test_control_blocks_say_what_a_mesh_says(driver: FakeDriver, registered: Registered) -> None:
    mailbox = make()
    running = kernels(driver, registered, mailbox.number)
    assert len(running) == 8
    for (rank, _), ordinal in np.ndenumerate(ORDINALS):
        kernel = running[ordinal]
        found = [kernel.number(at) for at in (layout.RANK, layout.RANKS)]
        assert found == [rank, 4]
        assert [kernel.number(at) for at in (layout.EPOCH, layout.TICKET, layout.STATE)] == [0] * 3
        assert kernel.number(layout.HALF_BYTES, "Q") == HALF_BYTES
        assert kernel.number(layout.TIMEOUT, "Q") == 1_500_000_000
        entry = registered[ordinal, mailbox.number]
        assert (entry["half_bytes"], entry["ranks"], report_of(entry)) == (HALF_BYTES, 4, 0)
        assert kernel.is_empty()
        assert len(kernel.own_box) == 2 * HALF_BYTES


def test_what_a_rank_publishes_arrives_in_its_group_only(
    driver: FakeDriver, registered: Registered
) -> None:
    running = kernels(driver, registered, make().number)
    for ordinal, kernel in running.items():
        kernel.publish(ordinal)
    for group in ORDINALS.T:
        for rank, ordinal in enumerate(group):
            assert running[ordinal].came() == [[r, rank, sender] for r, sender in enumerate(group)]
    with pytest.raises(Refused):
        driver.store(ORDINALS[0, 1], running[ORDINALS[0, 0]].boxes[0], b"stray")


def test_peers_write_only_to_memory_that_was_emptied(
    driver: FakeDriver, registered: Registered, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until all processes are ready nothing is registered, and the device has done its part."""
    at_meeting: list[Any] = []
    exchange = Meeting.exchange

    def spy(meeting: Meeting, value: Any) -> Any:
        at_meeting.append((value, dict(registered), driver.calls[-2:]))
        return exchange(meeting, value)

    monkeypatch.setattr(Meeting, "exchange", spy)
    mailbox = make()
    assert at_meeting[-1] == ("empty", {}, ["cuCtxSynchronize", "cuCtxPopCurrent"])
    at_meeting.clear()
    mailbox.reset()
    assert at_meeting[-1] == ("empty", {}, ["cuCtxSynchronize", "cuCtxPopCurrent"])
    assert len(at_meeting) == 2  # before, all have stopped publishing


def test_closing_frees_all_but_what_graphs_may_hold(
    driver: FakeDriver, registered: Registered
) -> None:
    mailbox = make()
    assert driver.live == {kind: 8 * count for kind, count in MEMORY_OF_A_RANK.items()}
    running = kernels(driver, registered, mailbox.number)
    entries = list(registered.values())
    mailbox.close()
    mailbox.close()
    assert +driver.live == {"device": 8, "host": 8}
    assert registered == {}
    assert {kernel.number(layout.STATE) for kernel in running.values()} == {layout.CLOSED}
    assert {report_of(entry) for entry in entries} == {layout.CLOSED}
    assert mailbox.closed
    mailbox.check()
    for refused in (mailbox.reset, lambda: mailbox.require(mailbox.mesh, "dcp", 1, HEADS, "")):
        with pytest.raises(ValueError, match=r"mailbox must be open, got DcpMailbox\(.*new one"):
            refused()


def test_a_failure_at_any_call_leaves_nothing(driver: FakeDriver, registered: Registered) -> None:
    mesh = mesh_of([[1], [0]])
    make(mesh)
    assert {"cuMemMap", "cuMemSetAccess", "cuMemcpyHtoD"} < set(driver.calls)
    for failing, name in enumerate(driver.calls):
        broken = FakeDriver(2)
        broken.fail_at = failing
        with pytest.MonkeyPatch.context() as patch:
            broken_registered = install(patch, broken)
            with pytest.raises(SetupError, match=f"{name} returned CUDA_ERROR_OUT_OF_MEMORY"):
                make(mesh)
        assert (+broken.live, broken_registered) == ({}, {}), name


def test_a_missing_rank_is_named_until_a_reset(driver: FakeDriver, registered: Registered) -> None:
    mailbox = make()
    running = kernels(driver, registered, mailbox.number)
    before = {ordinal: kernel.block for ordinal, kernel in running.items()}
    mailbox.check()
    for kernel in running.values():
        kernel.set(layout.EPOCH, 7)
        driver.store(kernel.ordinal, kernel.boxes[1], b"late words")
    running[5].give_up(rank=2)
    with pytest.raises(PeerTimeout, match=r"local_hardware_id=5.* 1\.5 s .*rank 2 .*_id=7.*reset"):
        mailbox.check()
    mailbox.reset()
    mailbox.check()
    assert {ordinal: kernel.block for ordinal, kernel in running.items()} == before
    assert all(kernel.is_empty() for kernel in running.values())
    assert [report_of(entry) for entry in registered.values()] == [0] * 8


def test_a_missing_rank_is_named_after_closing_too(
    driver: FakeDriver, registered: Registered
) -> None:
    with make() as mailbox:
        kernels(driver, registered, mailbox.number)[0].give_up(rank=3)
    assert mailbox.closed
    with pytest.raises(PeerTimeout, match="rank 3"):
        mailbox.check()


def test_a_reset_that_fails_leaves_calls_refused(
    driver: FakeDriver, registered: Registered
) -> None:
    mailbox = make()
    driver.fail_at = len(driver.calls) + 8 * 4  # the drains have passed
    with pytest.raises(SetupError):
        mailbox.reset()
    assert registered == {}
    mailbox.reset()
    assert len(registered) == 8


def test_mailboxes_are_themselves(driver: FakeDriver, registered: Registered) -> None:
    first, second = make(), make(q_dtype="bfloat16", max_batch=400)
    assert first.number < second.number
    assert len({first, second, first}) == 2
    assert (first.ranks, first.axis, first.max_batch, first.heads) == (4, "dcp", BATCH, HEADS)
    assert repr(first) == (
        "DcpMailbox(axis='dcp', ranks=4, max_batch=2, heads=3, q_dtype='float8_e4m3fn',"
        f" timeout=1.5, number={first.number}, closed=False)"
    )
    large = registered[0, second.number]["half_bytes"]
    assert large == 400 * 4 * HEADS * 1152 > GRANULARITY
    first.require(first.mesh, "dcp", 1, HEADS, "float8_e4m3fn")
    with pytest.raises(ValueError, match="max_batch = 2"):
        first.require(first.mesh, "dcp", 3, HEADS, "float8_e4m3fn")
    assert len(kernels(driver, registered, second.number)[0].own_box) == 2 * large


def test_devices_that_cannot_have_mailboxes_are_named(
    driver: FakeDriver, registered: Registered
) -> None:
    cpus = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("dcp",))
    with pytest.raises(UnsupportedError, match=r"needs NVIDIA GPUs, got .*leave mailbox out"):
        make(cpus)
    elsewhere = jax.sharding.Mesh(np.array([FakeDevice(0, process_index=3)]), ("dcp",))
    with pytest.raises(ValueError, match="devices of this process, 0, got those of 3 only"):
        make(elsewhere)
    driver.names[4] = "Fake H200 MIG 1g.18gb"
    with pytest.raises(UnsupportedError, match=r"MIG 1g\.18gb \(device 4.*part of a GPU.*whole"):
        make()
    driver.unconnected.add((1, 3))
    driver.names.clear()
    make()  # 1 and 3 are in different groups
    with pytest.raises(UnsupportedError, match=r"\(device 1, .*cannot write to .*\(device 3, "):
        make(mesh_of([[3], [1]]))
    assert len({number for _, number in registered}) == 1


def test_several_processes_need_a_store(driver: FakeDriver, registered: Registered) -> None:
    spanning = jax.sharding.Mesh(np.array([DEVICES[0], FakeDevice(0, process_index=1)]), ("dcp",))
    with pytest.raises(SetupError, match=r"jax\.distributed.*not started.*initialize"):
        make(spanning)
    assert (+driver.live, registered) == ({}, {})
