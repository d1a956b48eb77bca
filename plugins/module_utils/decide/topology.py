# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How the ranks of a wanted configuration lie on the chosen GPUs, and which ports they will want."""

from __future__ import annotations

import typing as t
from decimal import Decimal

from ..model import PortUse, Process
from ..plan_model import MIB, Finding, GpuFacts, ModelFacts, PortWish, Topology
from ..sglang.flags import canonical, meaning
from ..sglang.install import version_tuple
from .ports import judge_ports

_ZMQ_TCP_PORT_DELTA = 233
_DP_HANDSHAKE_PORT_DELTA = 13
_DERIVED_PORTS = 5
_DEFAULT_PORT = 30000
_SOURCE = "SGLang server_args.py"
# SGLang refuses to start where the smallest GPU has less than this part of another one's free memory.
_BALANCE = 0.9


class Flags:
    """The wanted flags under their canonical names, with the values that SGLang would read. False means unset."""

    def __init__(self, flags: t.Mapping[str, t.Any]) -> None:
        self._values = {canonical(str(name)): value for name, value in flags.items()}
        self.bad: list[str] = []

    def has(self, name: str) -> bool:
        """Whether a flag is set to something that is not false."""
        value = self._values.get(name)
        return value is not None and meaning(value) != "false" and value not in ([], ())

    def text(self, name: str, default: t.Optional[str] = None) -> t.Optional[str]:
        """A word; a list of one word is that word."""
        value = self._values.get(name)
        if isinstance(value, (list, tuple)) and len(value) == 1:
            value = value[0]
        if not self.has(name) or isinstance(value, (bool, list, tuple, t.Mapping)):
            return default
        return str(value).strip()

    def number(self, name: str) -> t.Optional[Decimal]:
        """A finite number ('128k' is 128000); a value that is none is noted in ``bad`` and None."""
        if not self.has(name):
            return None
        value = meaning(self._values[name])
        if isinstance(value, Decimal) and value.is_finite():
            return value
        self._refuse(name)
        return None

    def whole(self, name: str, default: t.Optional[int] = None) -> t.Optional[int]:
        """A whole number, ``default`` where the flag isn't set, None where it is set to something else."""
        if not self.has(name):
            return default
        number = self.number(name)
        if number is None:
            return None
        if number != number.to_integral_value() or abs(number) > 1 << 62:
            self._refuse(name)
            return None
        return int(number)

    def _refuse(self, name: str) -> None:
        if name not in self.bad:
            self.bad.append(name)


def plan_topology(
    flags: t.Mapping[str, t.Any],
    gpus: t.Optional[t.Sequence[GpuFacts]],
    model: t.Optional[ModelFacts] = None,
    version: t.Optional[str] = None,
) -> tuple[Topology, tuple[Finding, ...]]:
    """The topology of a wanted configuration on the GPUs that it would see, and what stands against it.

    ``gpus`` None: they could not be listed. An empty list: the server was given none (it runs on the CPU).
    """
    wanted = Flags(flags)
    topology, findings = _shape(wanted, gpus, version)
    findings += _gpu_findings(wanted, topology, gpus)
    findings += _node_findings(wanted, topology)
    if model is not None:
        findings += _head_findings(topology, model)
    findings += [_bad_number(name) for name in wanted.bad]
    return topology, tuple(findings)


def wished_ports(flags: t.Mapping[str, t.Any]) -> tuple[PortWish, ...]:
    """The TCP ports that are known before the start. NCCL's port is random unless the user sets it."""
    return _ports(Flags(flags))


def judge_port_wishes(
    wishes: t.Sequence[PortWish],
    uses: t.Optional[t.Sequence[PortUse]],
    processes: t.Optional[t.Mapping[int, Process]] = None,
) -> tuple[Finding, ...]:
    """What stands against the wished ports now. ``uses`` None: nobody could look."""
    purposes: dict[int, str] = {}
    for wish in wishes:
        purposes[wish.port] = f"{purposes[wish.port]}, {wish.purpose}" if wish.port in purposes else wish.purpose
    severities = {"port_busy": "deny", "ports_unknown": "unknown", "port_in_use_by_connection": "note"}
    findings = []
    for reason in judge_ports(uses, tuple(purposes), processes):
        port = int(reason.subject.rpartition(" ")[2])
        findings.append(
            Finding(
                reason.code,
                severities.get(reason.code, "warn"),
                reason.subject,
                f"{reason.message} (wanted for {purposes[port]})",
                "stop what listens there, or choose another port" if reason.code == "port_busy" else "",
                "the host's table of TCP sockets",
            )
        )
    return tuple(findings)


# --- the shape --------------------------------------------------------------------------------------------------------


def _shape(
    wanted: Flags, gpus: t.Optional[t.Sequence[GpuFacts]], version: t.Optional[str]
) -> tuple[Topology, list[Finding]]:
    findings: list[Finding] = []
    tp, pp, dp = (wanted.whole(name, 1) for name in ("tp-size", "pp-size", "dp-size"))
    nnodes, node_rank = wanted.whole("nnodes", 1), wanted.whole("node-rank", 0)
    attention_dp = wanted.has("enable-dp-attention")
    attn_size = wanted.whole("attn-dp-size")
    if attn_size is not None and attn_size > 1:  # 0.5.22 and later
        attention_dp, dp = True, attn_size
    for name, value in (("tp-size", tp), ("pp-size", pp), ("dp-size", dp), ("nnodes", nnodes)):
        if value is not None and value < 1:
            findings.append(_deny("topology_size", name, f"{name} is {value}; it must be 1 or more", "correct it"))
    if findings:
        tp, pp, dp, nnodes = ((value if value and value > 0 else None) for value in (tp, pp, dp, nnodes))
    if attention_dp and dp == 1 and not wanted.has("attn-dp-size"):
        attention_dp = False  # SGLang switches it off again
        known = version_tuple(version)
        if known is None or known < (0, 5, 22):
            findings.append(
                Finding(
                    "attention_dp_off",
                    "warn",
                    "enable-dp-attention",
                    "enable-dp-attention does nothing with a dp-size of 1: SGLang switches it off",
                    "set dp-size (usually to tp-size), or leave enable-dp-attention away",
                    _SOURCE,
                )
            )
    ranks = attention_tp = None
    if tp is not None and pp is not None and dp is not None and nnodes is not None:
        replicas = 1 if attention_dp else dp
        ranks = tp * pp * replicas // nnodes if nnodes and (tp * pp * replicas) % nnodes == 0 else None
    if tp is not None and dp is not None:
        attention_tp = tp // dp if attention_dp and tp % dp == 0 else (None if attention_dp else tp)
    used: tuple[GpuFacts, ...] = tuple(gpus or ())
    if ranks is not None and gpus is not None:
        base, step = wanted.whole("base-gpu-id", 0) or 0, wanted.whole("gpu-id-step", 1) or 1
        if base >= 0 and step >= 1:
            used = tuple(gpus)[base::step][:ranks]
    topology = Topology(
        tp=tp,
        pp=pp,
        dp=dp,
        attention_dp=attention_dp,
        nnodes=nnodes,
        node_rank=node_rank,
        ranks_here=ranks,
        gpus=used,
        attention_tp=attention_tp,
        ports=_ports(wanted),
    )
    return topology, findings


def _gpu_findings(wanted: Flags, topology: Topology, gpus: t.Optional[t.Sequence[GpuFacts]]) -> list[Finding]:
    if wanted.text("device") == "cpu":
        return []
    if gpus is None:
        return [
            Finding("gpus_unknown", "unknown", "GPUs", "which GPUs the server would get is not known", "", "the driver")
        ]
    ranks, chosen, used = topology.ranks_here, len(gpus), topology.gpus
    findings: list[Finding] = []
    if ranks is not None and len(used) < ranks:
        findings.append(
            _deny(
                "gpus_too_few",
                "GPUs",
                f"{ranks} ranks on this host need {ranks} GPUs ({_arithmetic(topology)}), and the server gets"
                f" {len(used) if len(used) != chosen else chosen}",
                "choose more GPUs, or lower tp-size, pp-size or dp-size",
            )
        )
    elif ranks is not None and chosen > ranks:
        spare = [gpu.index for gpu in gpus if gpu not in used]
        findings.append(
            Finding(
                "gpus_spare",
                "warn",
                "GPUs",
                f"{chosen} GPUs are chosen and {ranks} ranks use them: GPU {', '.join(map(str, spare))} stays idle",
                "take them off the server's list, or raise tp-size",
                _SOURCE,
            )
        )
    findings += _unlike(used)
    return findings


def _unlike(gpus: t.Sequence[GpuFacts]) -> list[Finding]:
    findings: list[Finding] = []
    for what, values in (
        ("models", {gpu.name for gpu in gpus if gpu.name}),
        ("compute capabilities", {gpu.compute_capability for gpu in gpus if gpu.compute_capability}),
    ):
        if len(values) > 1:
            findings.append(
                Finding(
                    "gpus_differ",
                    "warn",
                    "GPUs",
                    f"the ranks' GPUs are of different {what}: {', '.join(sorted(str(value) for value in values))}",
                    "choose GPUs of one model: the smallest one bounds all of them",
                    _SOURCE,
                )
            )
    free = {gpu.index: gpu.free_mib + gpu.returned_mib for gpu in gpus if gpu.free_mib is not None}
    if len(free) > 1:
        least, most = min(free, key=lambda index: free[index]), max(free, key=lambda index: free[index])
        if free[least] < _BALANCE * free[most]:
            findings.append(
                _deny(
                    "gpus_unbalanced",
                    f"GPU {least}",
                    f"GPU {least} has {free[least]:,} MiB for a start and GPU {most} {free[most]:,} MiB: SGLang refuses"
                    " ('The memory capacity is unbalanced') where one has less than 0.9 of another",
                    "free the GPU first (playbook teardown), or choose others",
                    source="SGLang model_executor/model_runner.py init_torch_distributed",
                    waivable=True,
                )
            )
    return findings


def _node_findings(wanted: Flags, topology: Topology) -> list[Finding]:
    findings: list[Finding] = []
    tp, pp, dp, nnodes, rank = topology.tp, topology.pp, topology.dp, topology.nnodes, topology.node_rank
    if topology.attention_dp and tp is not None and dp is not None and tp % dp:
        findings.append(
            _deny(
                "attention_dp_size",
                "dp-size",
                f"tp-size {tp} is no multiple of dp-size {dp}, and with attention-DP it has to be",
                "choose a dp-size that divides tp-size",
            )
        )
    if nnodes is None:
        return findings
    if tp is not None and pp is not None and (tp * pp) % nnodes:
        findings.append(
            _deny(
                "nodes_divide",
                "nnodes",
                f"tp-size x pp-size = {tp * pp} ranks can't be divided by {nnodes} nodes",
                "choose sizes whose product is a multiple of nnodes",
            )
        )
    if rank is not None and not 0 <= rank < nnodes:
        findings.append(
            _deny("node_rank", "node-rank", f"node-rank is {rank}, and there are {nnodes} nodes: 0 to {nnodes - 1}", "")
        )
    if nnodes > 1 and not wanted.has("dist-init-addr"):
        findings.append(
            _deny(
                "dist_init_addr",
                "dist-init-addr",
                f"{nnodes} nodes need dist-init-addr: without it each one waits for the others on its own host",
                "set dist-init-addr to node 0's address and a free port, the same on all nodes",
            )
        )
    if nnodes > 1 and dp is not None and dp > 1 and not topology.attention_dp:
        findings.append(
            _deny("nodes_dp", "dp-size", "dp-size over several nodes works only with enable-dp-attention", "set it")
        )
    if nnodes > 1:
        findings.append(
            Finding(
                "other_nodes",
                "note",
                "nnodes",
                f"this is node {rank if rank is not None else '?'} of {nnodes}: the other nodes are not looked at here",
                "plan them too; all nodes need the same flags but for node-rank",
                _SOURCE,
            )
        )
    return findings


def _head_findings(topology: Topology, model: ModelFacts) -> list[Finding]:
    heads, share = model.attention_heads, topology.attention_tp
    if heads is None or not share or heads % share == 0:
        return []
    return [
        _deny(
            "heads_divide",
            "tp-size",
            f"{heads} attention heads can't be divided by {share} ranks",
            "choose a tp-size that divides the number of heads",
            source="SGLang models: num_attention_heads % tp_size",
            waivable=True,
        )
    ]


def _arithmetic(topology: Topology) -> str:
    parts = [f"tp {topology.tp}", f"pp {topology.pp}"]
    if not topology.attention_dp:
        parts.append(f"dp {topology.dp}")
    return " x ".join(parts) + (f" / {topology.nnodes} nodes" if topology.nnodes != 1 else "")


def lowest_capability(gpus: t.Iterable[GpuFacts]) -> t.Optional[str]:
    """The lowest compute capability, '12.0' being more than '9.0'; None if one of them is not known."""
    found: list[tuple[int, ...]] = []
    for gpu in gpus:
        parts = (gpu.compute_capability or "").split(".")
        if not all(part.isascii() and part.isdigit() and len(part) <= 5 for part in parts):
            return None
        found.append(tuple(int(part) for part in parts))
    return ".".join(map(str, min(found))) if found else None


def smallest_free_bytes(gpus: t.Sequence[GpuFacts]) -> t.Optional[int]:
    """Free memory of the GPU with the least, with what the replaced server gives back; None if one is not known."""
    values = [None if gpu.free_mib is None else gpu.free_mib + gpu.returned_mib for gpu in gpus]
    return None if not values or None in values else min(t.cast("list[int]", values)) * MIB


# --- ports ------------------------------------------------------------------------------------------------------------


def _ports(wanted: Flags) -> tuple[PortWish, ...]:
    port = wanted.whole("port", _DEFAULT_PORT)
    nnodes, rank = wanted.whole("nnodes", 1) or 1, wanted.whole("node-rank", 0) or 0
    wishes = [(port, "HTTP" if rank == 0 else "HTTP (health of a further node)")]
    wishes.append((wanted.whole("nccl-port"), "nccl-port"))
    init = wanted.text("dist-init-addr")
    init_port = _port_of(init)
    if init is not None and rank == 0:
        wishes.append((init_port, "dist-init-addr"))
    attn_size = wanted.whole("attn-dp-size")
    if wanted.has("enable-dp-attention") or (attn_size is not None and attn_size > 1):
        base = init_port
        if init is None and nnodes == 1 and port is not None:
            base = port + _ZMQ_TCP_PORT_DELTA
            if base > 65535:
                base = port - _ZMQ_TCP_PORT_DELTA
            wishes.append((base, "attention-DP"))
        if base is not None and rank == 0:
            first = base - _DERIVED_PORTS - 1 if base + _DERIVED_PORTS > 65535 else base + 1
            names = ("tokenizer", "detokenizer", "rpc", "metrics", "scheduler", "load collector")
            wishes += [(first + offset, f"attention-DP {name}") for offset, name in enumerate(names)]
            if nnodes > 1:
                wishes.append((base + _DP_HANDSHAKE_PORT_DELTA, "attention-DP handshake of the nodes"))
    if wanted.text("disaggregation-mode", "null") == "prefill":
        wishes.append((wanted.whole("disaggregation-bootstrap-port", 8998), "disaggregation bootstrap"))
    wishes.append((wanted.whole("engine-info-bootstrap-port"), "engine-info-bootstrap-port"))
    wishes.append((wanted.whole("grpc-port"), "grpc-port"))
    return tuple(PortWish(number, purpose) for number, purpose in wishes if number is not None and 0 < number < 65536)


def _port_of(address: t.Optional[str]) -> t.Optional[int]:
    text = (address or "").rpartition(":")[2]
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 5 else None


def _deny(code: str, subject: str, message: str, remedy: str, source: str = _SOURCE, waivable: bool = False) -> Finding:
    return Finding(code, "deny", subject, message, remedy, source, waivable)


def _bad_number(name: str) -> Finding:
    return Finding("flag_number", "unknown", name, f"{name} is no number that can be read here", "correct it", _SOURCE)
