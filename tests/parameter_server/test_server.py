"""A server in a thread, and clients that talk to it, well or badly."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import resource
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist
import zmq

from lit_parallel.parameter_server.__main__ import main
from lit_parallel.parameter_server.client import Client
from lit_parallel.parameter_server.server import Server
from lit_parallel.parameter_server.wire import CurveKeys, encode
from lit_parallel.testing import run_ranks
from lit_parallel.transports import TransportError


@contextlib.contextmanager
def serving(endpoint, keys=None, number=1):
    servers = [Server(endpoint.replace("N", str(each)), keys) for each in range(number)]
    threads = [threading.Thread(target=server.run) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield [server.endpoint for server in servers]
    finally:
        for server in servers:
            server.close()
        for thread in threads:
            thread.join()


@contextlib.contextmanager
def connected(endpoints, weights, keys=None, worker=0):
    client = Client(endpoints, worker, weights, keys)
    try:
        yield client
    finally:
        client.close()


def weights_of(optimizer_class=torch.optim.SGD, **options):
    torch.manual_seed(0)
    weights = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in [("a", (3, 5)), ("b", (7,))]}
    optimizer = optimizer_class(weights.values(), lr=0.1, **options)
    return weights, optimizer, {weight: name for name, weight in weights.items()}


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("parts", [False, True])
def test_a_push_and_a_pull_are_a_step_of_the_optimizer(tmp_path, monkeypatch, number, secure, parts):
    monkeypatch.setattr("lit_parallel.parameter_server.client._PART_BYTES", 32)
    keys = CurveKeys.generate() if secure else None
    endpoint = "tcp://127.0.0.1:*" if secure else f"ipc://{tmp_path}/N"
    weights, optimizer, names = weights_of(torch.optim.AdamW)
    start = {name: weight.detach().clone() for name, weight in weights.items()}
    with serving(endpoint, keys, number) as endpoints, connected(endpoints, weights, keys) as client:
        client.init(1, 0, optimizer, names)
        client.enter(0)
        pulled = {name: torch.empty_like(weight) for name, weight in start.items()}
        for version in (1, 2, 3):
            for weight in weights.values():
                weight.grad = torch.randn_like(weight)
            if parts:  # of which one changes again, and one is replaced
                for name in ("b", "a"):
                    client.push_part(name, weights[name].grad)
                weights["a"].grad.mul_(2)
                if version == 2:
                    weights["b"].grad = torch.ones_like(weights["b"])
            client.push({name: weight.grad for name, weight in weights.items()}, [{"lr": 0.1 / version}])
            result, present = client.pull(pulled)
            assert (result.version, result.staleness, present) == (version, 0, {"a", "b"})
            optimizer.param_groups[0]["lr"] = 0.1 / version
            optimizer.step()
            for name, weight in weights.items():
                assert torch.equal(pulled[name], weight)
        state = client.optimizer_state()
        for name, weight in weights.items():
            for key, value in optimizer.state[weight].items():
                assert torch.equal(state[name][key], value)
        sizes = [sum(len(piece) for piece in shard) for shard in client.shards]
        assert max(sizes) - min(sizes) <= 1


def race(folder, steps, staleness):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    weights, optimizer, names = weights_of()
    for weight in weights.values():
        weight.detach().zero_()  # so that all sums are exact
    found, held, delays = [], [], random.Random(rank)
    with contextlib.ExitStack() as stack:
        shared = [stack.enter_context(serving(f"ipc://{folder}/N", number=2)) if rank == 0 else None]
        dist.broadcast_object_list(shared)
        client = stack.enter_context(connected(shared[0], weights, worker=rank))
        if rank == 0:
            client.init(world_size, staleness, optimizer, names)
        dist.barrier()
        client.enter(0)
        dist.barrier()
        pulled = {name: weight.detach().clone() for name, weight in weights.items()}
        ones = {name: torch.ones_like(weight) for name, weight in pulled.items()}
        for step in range(steps):
            if delays.random() < 0.05:
                threading.Event().wait(delays.random() * 0.01)
            client.push(ones, [{"lr": 1 / 1024}])
            found.append(client.pull(pulled)[0].staleness)
            if step % (steps // 5) == 0:
                kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                held.append((kilobytes, len(os.listdir("/proc/self/fd"))))
        dist.barrier()
        last, _ = client.pull(pulled)
        dist.barrier()
    return max(found), last.version, held, pulled


@pytest.mark.parametrize(("staleness", "steps"), [(3, 5000), (0, 300), (math.inf, 300)])
def test_staleness_stays_within_the_bound_and_every_push_counts_once(tmp_path, staleness, steps):
    """With 3, 20,000 steps of four workers with random delays: sums are exact, and memory stays flat."""
    for most, version, held, pulled in run_ranks(race, 4, tmp_path, steps, staleness, timeout=240):
        assert most <= staleness
        assert most > 0 or staleness == 0  # the bound was put to the test
        assert version == (steps if staleness == 0 else 4 * steps)
        for value in pulled.values():  # each push a step of 1/4 of the learning rate
            assert torch.equal(value, torch.full_like(value, -steps / 1024))
        (early, descriptors), *_, (late, descriptors_late) = held[1:]
        assert late - early < 1000  # kilobytes
        assert descriptors_late == descriptors


@contextlib.contextmanager
def raw(endpoint, keys=None):
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            socket.curve_serverkey = keys.server_public.encode()
            socket.curve_publickey, socket.curve_secretkey = keys.worker_public.encode(), keys.worker_secret.encode()
        socket.connect(endpoint)
        yield socket


SHARE = {"op": "share", "worker": 0, "life": 1, "descriptor": 0}
PUSH = {"op": "push", "worker": 0, "life": 1, "clock": 1, "sent": [], "keys": []}


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([b""], "the header is not JSON"),
        ([b"[1]"], "the header is not a JSON object"),
        ([b"{" * 100_000], "the header is not JSON"),
        ([b" " * 2_000_000], "a header of 2000000 bytes"),
        (encode({"op": "steal"}), "'op' must be one of init, enter, leave"),
        (encode({"op": ["push"]}), "'op' must be one of init, enter, leave"),
        (encode({"op": "pull", "worker": 7, "life": 1}), "there is no worker 7"),
        (encode({"op": "pull", "worker": "0"}), "'worker' must be a whole number"),
        (encode({**PUSH, "keys": [0, 0], "options": [{}]}), "a list of different whole numbers"),
        (encode({**PUSH, "keys": [9], "options": [{}]}), "there are keys 0 to 1, not all of .9."),
        (encode({**PUSH, "sent": [9], "options": [{}]}, [torch.zeros(3)]), "there are keys 0 to 1, not all of .9."),
        (encode({**PUSH, "sent": [0, 1], "options": [{}]}, [torch.zeros(3)]), "1 frames for the keys .0, 1."),
        (encode({**PUSH, "keys": [0], "options": [{}]}), "the gradients of the keys .0. have not come"),
        (encode({**PUSH, "sent": [0], "options": [{}]}, [torch.zeros(3)]), "12 bytes where 60 belong"),
        (encode({**PUSH, "options": 3}), "'options' must be a list of 1 groups"),
        (encode({**PUSH, "options": [{"lr": "high"}]}), "option lr='high'"),
        (encode({**PUSH, "options": [{"params": []}]}), "option params="),
        (encode({"op": "release", "version": 0, "scale": math.nan}), "'scale' must be a finite number"),
        (
            encode({**SHARE, "pid": 2**70, "offsets": []}),
            "OverflowError|Error",
        ),
        (encode({**SHARE, "pid": os.getpid(), "offsets": []}), "Error"),
        (encode({"op": "load", "state": [{"a": {"frame": 3, "dtype": "float32"}}]}), "IndexError"),
        (encode({"op": "init", "num_workers": 10**12, "lengths": [], "dtypes": []}), "'num_workers' must be from 1"),
        (
            encode(
                {"op": "init", "num_workers": 1, "staleness": 0, "lengths": [10**15], "dtypes": ["float32"]},
                [torch.zeros(1)],
            ),
            "a frame has 4 bytes for 1000000000000000 elements",
        ),
    ],
)
def test_what_is_wrong_is_refused_and_disturbs_nobody(tmp_path, frames, message, caplog):
    weights, optimizer, names = weights_of()
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    with serving(f"ipc://{tmp_path}/N") as endpoints, connected(endpoints, weights) as client:
        client.init(2, 0, optimizer, names)
        with raw(endpoints[0]) as socket:
            for _ in range(3):
                socket.send_multipart(frames)
                assert socket.poll(5000)
                assert re.search(message, json.loads(socket.recv_multipart()[0])["error"])
        assert len(caplog.records) == 1  # logged once
        pulled = {name: torch.empty_like(weight) for name, weight in before.items()}
        client.pull(pulled)
        for name, value in before.items():
            assert torch.equal(pulled[name], value)


def test_a_refused_push_ends_the_workers_pull_with_the_reason(tmp_path):
    weights, optimizer, names = weights_of()
    with serving(f"ipc://{tmp_path}/N") as endpoints, connected(endpoints, weights, worker=5) as client:
        client.init(2, 0, optimizer, names)
        client.push({name: weight.detach() for name, weight in weights.items()}, [{}])
        with pytest.raises(TransportError, match="The server at ipc.*there is no worker 5"):
            client.pull({name: weight.detach() for name, weight in weights.items()})


def test_whoever_lacks_the_keys_is_not_heard(monkeypatch):
    monkeypatch.setattr("lit_parallel.parameter_server.connection._SILENCE_SECONDS", 1.5)
    keys = CurveKeys.generate()
    weights, optimizer, names = weights_of()
    with serving("tcp://127.0.0.1:*", keys) as endpoints, connected(endpoints, weights, keys) as client:
        client.init(1, 0, optimizer, names)
        stranger = CurveKeys.generate()
        wrong = CurveKeys(keys.server_public, "", stranger.worker_public, stranger.worker_secret)
        for each in (None, wrong):
            with raw(endpoints[0], each) as socket:
                socket.send_multipart(encode({"op": "ping"}))
                assert not socket.poll(500)
        with connected(endpoints, weights, wrong) as other, pytest.raises(TransportError, match="or has other keys"):
            other.pull({name: weight.detach() for name, weight in weights.items()})
        client.pull({name: weight.detach() for name, weight in weights.items()})


def test_noise_neither_ends_nor_swells_a_server(tmp_path):
    """10,000 damaged messages of one that has the keys, and a million random bytes of one that has not."""
    import socket as sockets

    keys, noise = CurveKeys.generate(), random.Random(0)
    weights, optimizer, names = weights_of()
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    with serving("tcp://127.0.0.1:*", keys) as endpoints, connected(endpoints, weights, keys) as client:
        client.init(2, 0, optimizer, names)
        host, port = endpoints[0].removeprefix("tcp://").split(":")
        for _ in range(10):
            with sockets.create_connection((host, int(port))) as plain, contextlib.suppress(OSError):
                plain.sendall(noise.randbytes(100_000))
        header = json.dumps({**PUSH, "clock": 2, "keys": [0, 1], "sent": [0, 1], "options": [{}]}).encode()
        payload = [bytes(60), bytes(28)]
        held = []
        with raw(endpoints[0], keys) as socket:
            for number in range(10_000):
                damaged = bytearray(header)
                for _ in range(noise.randrange(1, 4)):
                    damaged[noise.randrange(len(damaged))] = noise.randrange(256)
                frames = [bytes(damaged), *payload[: noise.randrange(3)], *[b"x"] * noise.randrange(2)]
                socket.send_multipart(frames)
                while socket.poll(0):
                    socket.recv_multipart()
                if number % 1000 == 0:
                    held.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
            socket.send_multipart(encode({"op": "ping"}))
            while "error" in json.loads(socket.recv_multipart()[0]):
                pass  # until all have been served
            held.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        assert held[-1] - held[2] < 10_000  # kilobytes
        pulled = {name: torch.empty_like(weight) for name, weight in before.items()}
        client.pull(pulled)
        for name, value in before.items():
            assert torch.equal(pulled[name], value)


def test_a_silent_server_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("lit_parallel.parameter_server.connection._SILENCE_SECONDS", 1.5)
    weights, *_ = weights_of()
    message = "The server at ipc://.*/nobody has not answered"
    with connected([f"ipc://{tmp_path}/nobody"], weights) as client, pytest.raises(TransportError, match=message):
        client.pull({name: weight.detach() for name, weight in weights.items()})


def test_a_place_where_nobody_can_listen_is_refused():
    with pytest.raises(ValueError, match="A server cannot listen at ipc:///no/such/folder/1"):
        Server("ipc:///no/such/folder/1")


def test_a_server_by_hand(tmp_path, monkeypatch, capsys):
    file = tmp_path / "keys.json"
    monkeypatch.setattr(sys, "argv", ["server", "--make-keys", str(file)])
    main()
    assert os.stat(file).st_mode & 0o777 == 0o600
    monkeypatch.setattr(sys, "argv", ["server", "--bind", "tcp://127.0.0.1:*"])
    with pytest.raises(SystemExit):
        main()
    assert "a server on the network needs --keys" in capsys.readouterr().err

    keys = CurveKeys.from_json(file.read_text())
    weights, optimizer, names = weights_of()
    command = [sys.executable, "-m", "lit_parallel.parameter_server", "--bind", "tcp://127.0.0.1:*", "--keys", file]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen([*command, "--end-with-input"], **pipes)
    with connected([server.stdout.readline().strip()], weights, keys) as client:
        client.init(1, 0, optimizer, names)
        client.pull({name: weight.detach() for name, weight in weights.items()})
    server.communicate()
    assert server.returncode == 0


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_a_server_started_again_goes_on_from_its_snapshot(tmp_path, monkeypatch, secure, counted):
    """The push that it did not answer is counted once, whether the snapshot has it or not."""
    monkeypatch.setattr("lit_parallel.parameter_server.server._SNAPSHOT_SECONDS", 0)
    keys = CurveKeys.generate() if secure else None
    weights, optimizer, names = weights_of(torch.optim.SGD, momentum=0.5)
    snapshot = tmp_path / "snapshot"
    endpoint = "tcp://127.0.0.1:*" if secure else f"ipc://{tmp_path}/0"
    pulled = {name: weight.detach().clone() for name, weight in weights.items()}
    with contextlib.ExitStack() as stack:
        server = Server(endpoint, keys, snapshot)
        thread = threading.Thread(target=server.run)
        thread.start()
        client = Client([server.endpoint], 0, weights, keys, check_hope=lambda: None)
        stack.callback(client.close)
        client.init(2, math.inf, optimizer, names)
        client.enter(0)
        for step in range(1, 4):
            for weight in weights.values():
                weight.grad = torch.randn_like(weight)
            gradients = {name: weight.grad for name, weight in weights.items()}
            if step == 3 and not counted:
                server.close()
                thread.join()
            client.push(gradients, [{"lr": 0.1}])
            if step == 3:
                while counted and torch.load(snapshot)["version"] < 3:
                    threading.Event().wait(0.05)
                server.close()
                thread.join()
                server = Server(server.endpoint, keys, snapshot)
                thread = threading.Thread(target=server.run)
                thread.start()
            assert client.pull(pulled)[0].version == step
            for weight in weights.values():
                weight.grad.div_(2)  # each push counts 1/2
            optimizer.step()
        client.push({}, [{"lr": 0.1}])  # and on
        assert client.pull(pulled)[0].version == 4
        for weight in weights.values():
            weight.grad.zero_()
        server.close()
        thread.join()
    for name, weight in weights.items():
        torch.testing.assert_close(pulled[name], weight.detach())


def test_workers_in_step_do_not_go_on_with_a_server_started_again(tmp_path):
    weights, optimizer, names = weights_of()
    with connected([f"ipc://{tmp_path}/0"], weights) as client:
        for number in range(2):
            with serving(f"ipc://{tmp_path}/N"):
                if number == 0:
                    client.init(1, 0, optimizer, names)
                    client.enter(0)
                else:
                    with pytest.raises(TransportError, match="has been started again.*Resume training from a checkp"):
                        client.pull({name: weight.detach() for name, weight in weights.items()})


def test_who_was_started_again_is_not_taken_for_who_was_before(tmp_path):
    weights, optimizer, names = weights_of()
    gradients = {name: torch.ones_like(weight) for name, weight in weights.items()}
    with serving(f"ipc://{tmp_path}/N") as endpoints, connected(endpoints, weights) as old:
        old.init(1, math.inf, optimizer, names)
        old.enter(0)
        new = Client(endpoints, 0, weights, life=2)
        new.enter(0)
        old.push(gradients, [{}])
        with pytest.raises(TransportError, match="worker 0 was taken for dead, and has been started again"):
            old.pull({name: weight.detach() for name, weight in weights.items()})
        assert new.pull({name: torch.empty_like(weight) for name, weight in weights.items()})[0].version == 0
        new.close()


@pytest.mark.parametrize("shared", [False, True])
def test_out_of_step_each_worker_has_its_own_momentum_and_looks_ahead(tmp_path, shared):
    weights, optimizer, names = weights_of(torch.optim.SGD, momentum=0.8)
    reference = {name: torch.nn.Parameter(weight.detach().clone()) for name, weight in weights.items()}
    own = [torch.optim.SGD(reference.values(), lr=0.05, momentum=0.8) for _ in range(2)]  # half of the rate
    seen = [None, None]
    with contextlib.ExitStack() as stack:
        endpoints = stack.enter_context(serving(f"ipc://{tmp_path}/N", number=2))
        clients = [stack.enter_context(connected(endpoints, weights, worker=worker)) for worker in range(2)]
        clients[0].init(2, math.inf, optimizer, names)
        if shared:
            for client in clients:
                client.enter(0)
        pulled = {name: weight.detach().clone() for name, weight in weights.items()}
        for worker in (0, 1, 1, 0, 1, 0):
            for parameter in reference.values():
                parameter.grad = torch.randn_like(parameter)
            clients[worker].push({name: each.grad for name, each in reference.items()}, [{"lr": 0.1}])
            clients[worker].pull(pulled)
            own[worker].step()
            now = {name: each.detach().clone() for name, each in reference.items()}
            before, seen[worker] = seen[worker] or now, now
            for name, value in now.items():
                # Of what has moved since its last pull, half is the other's; momentum will repeat 0.8 of it.
                torch.testing.assert_close(pulled[name], value + 0.8 / 2 * (value - before[name]))
        clients[0].leave()
        clients[0].pull(pulled)
        for name, value in reference.items():
            torch.testing.assert_close(pulled[name], value.detach())  # as they are
        state = clients[0].optimizer_state()
        for name, parameter in reference.items():
            mean = (own[0].state[parameter]["momentum_buffer"] + own[1].state[parameter]["momentum_buffer"]) / 2
            torch.testing.assert_close(state[name]["momentum_buffer"], mean)


def test_state_goes_to_the_right_keys_of_parameter_groups_that_interleave(tmp_path):
    torch.manual_seed(0)
    weights = {name: torch.nn.Parameter(torch.randn(size)) for name, size in [("a", 5), ("b", 3), ("c", 4), ("d", 2)]}
    groups = [{"params": [weights["d"], weights["b"]]}, {"params": [weights["c"], weights["a"]], "lr": 0.01}]
    optimizer = torch.optim.Adam(groups, lr=0.1)
    for _ in range(2):
        for weight in weights.values():
            weight.grad = torch.randn_like(weight)
        optimizer.step()
    state = {name: optimizer.state[weight] for name, weight in weights.items()}
    names = {weight: name for name, weight in weights.items()}
    with serving(f"ipc://{tmp_path}/N", number=2) as endpoints, connected(endpoints, weights) as client:
        client.init(1, 0, optimizer, names)
        client.load_optimizer_state(state)
        for name, values in client.optimizer_state().items():
            for key, value in values.items():
                assert torch.equal(value, state[name][key])
        client.push({name: weight.grad for name, weight in weights.items()}, [{}, {}])
        pulled = {name: torch.empty_like(weight) for name, weight in weights.items()}
        client.pull(pulled)
    optimizer.step()
    for name, weight in weights.items():
        torch.testing.assert_close(pulled[name], weight)
