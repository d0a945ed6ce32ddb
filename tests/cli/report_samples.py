"""JSON reports of models that no dump is written for: thousands of parameters, findings of every sort, hostile names."""

import math

import numpy as np

WEIGHTS = ["input_layernorm.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight",
           "self_attn.o_proj.weight", "post_attention_layernorm.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight",
           "mlp.down_proj.weight"]
RUN = {"processes": 2, "device": "cpu", "device_detail": "avx512", "device_reason": "no CUDA device",
       "communicator": "mpi", "communicator_detail": "Open MPI 4.1.4", "communicator_reason": "the launcher set it",
       "threads": 8, "numerics": "exact", "memory_budget_bytes": 8 << 30, "memory_peak_bytes": 312 << 20,
       "device_memory_budget_bytes": None, "device_memory_peak_bytes": None, "offload": None,
       "seconds": {"read": 1.5, "compute": 2.25, "write": 0.0, "total": 4.5}}
HISTOGRAM_TYPES = {"float16": (-24, 15), "bfloat16": (-133, 127), "float8_e4m3fn": (-9, 8), "float8_e5m2": (-16, 15)}


def json_number(value):
    if value is None or math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def head(command, parameters, world_size, elements=0):
    return {"format": "gradclip.report", "version": 1, "command": command,
            "dump": {"path": "/data/run-17/step-100", "step": 100, "world_size": world_size, "parameters": parameters,
                     "elements": elements, "bytes": 2 * elements}}


def finding(kind, parameter=None, ranks=(), index=None, value=None, message="what it is, in one sentence"):
    return {"kind": kind, "parameter": parameter, "ranks": list(ranks), "index": index, "value": json_number(value),
            "message": message}


def model_names(layers):
    yield "model.embed_tokens.weight"
    for layer in range(layers):
        for weight in WEIGHTS:
            yield f"model.layers.{layer}.{weight}"
    yield "model.norm.weight"
    yield "lm_head.weight"


def histogram(random, elements, scale):
    center = int(math.floor(math.log2(scale)))
    counts = {e: int(elements * math.exp(-((e - center) / 2.5) ** 2) / 4.43) for e in range(center - 9, center + 6)}
    exponents = sorted(e for e, n in counts.items() if n)
    casts = {}
    for name, (low, high) in HISTOGRAM_TYPES.items():
        casts[name] = {"underflow_to_zero": sum(n for e, n in counts.items() if e < low), "subnormal": 0,
                       "overflow": sum(n for e, n in counts.items() if e > high)}
    first = exponents[0] if exponents else 0
    return {"exponents": {"first": first, "counts": [counts.get(e, 0) for e in range(first, exponents[-1] + 1)] if exponents else []},
            "zeros": elements // 1000, "nan": 0, "posinf": 0, "neginf": 0, "casts": casts}


def norms(names=None, layers=32, *, histograms=False, bad=(), disagree=False, command="norms", seed=7):
    """A report of a model on a mesh of pp 2 x dp 4 x tp 2. `bad`: indices of parameters with NaN."""
    random = np.random.default_rng(seed)
    names = list(names) if names is not None else list(model_names(layers))
    parameters, powers, findings = [], 0.0, []
    for i, name in enumerate(names):
        is_norm = name.endswith("norm.weight")
        shape = [4096] if is_norm else [4096, 1024]
        elements = int(np.prod(shape))
        sigma = 1e-4 * math.exp(0.4 * random.standard_normal()) * (20 if is_norm else 1) * (1 + 2.0 * i / len(names))
        norm = sigma * math.sqrt(elements)
        powers += norm * norm
        nan = 17 if i in bad else 0
        parameters.append(
            {"name": name, "model_part": 0, "shape": shape, "dtype": "bfloat16", "mesh": f"stage{2 * i // len(names)}",
             "placements": ["Shard(0)", "Replicate()" if is_norm else "Shard(0)"], "expert": False, "counted": True, "none": 0,
             "elements": elements, "bytes": 2 * elements, "norm": "nan" if nan else norm, "share": norm * norm,
             "max_abs": 5.5 * sigma, "min_abs": 1e-5 * sigma, "mean": sigma * 0.01 * random.standard_normal(),
             "zeros": int(elements * abs(random.standard_normal()) * 1e-3), "subnormals": 0, "nan": nan, "posinf": 0,
             "neginf": 0, "first_nonfinite": {"index": [3] * len(shape), "rank": 1} if nan else None})
        if histograms:
            parameters[-1]["histogram"] = histogram(random, elements, sigma)
        if nan:
            findings.append(finding("nonfinite", name, [1], [3] * len(shape), 17, "17 NaN of 4,194,304 elements"))
    total = math.nan if bad else math.sqrt(powers)
    for each in parameters:
        each["share"] = json_number(math.nan if bad else each["share"] / powers)
    elements = sum(each["elements"] for each in parameters)
    seen = [{"total": json_number(total), "coefficient": json_number(1.0 / total), "ranks": list(range(16))}]
    if disagree:
        findings.append(finding("ranks-disagree", None, range(16), None, 0.25, "recorded ranks would have used 2 different totals"))
        seen = [{"total": json_number(part * total), "coefficient": json_number(1 / (part * total)), "ranks": list(ranks)}
                for part, ranks in ((0.75, range(8)), (1.0, range(8, 16)))]
    sums = {"parameters": len(names), "elements": elements, "bytes": 2 * elements, "norm": json_number(total),
            "share": json_number(math.nan if bad else 1.0)}
    groups = {}
    for each in parameters:
        group = groups.setdefault((each["mesh"], tuple(each["placements"])), {"parameters": 0, "elements": 0, "powers": 0.0})
        group["parameters"] += 1
        group["elements"] += each["elements"]
        group["powers"] += 0.0 if each["norm"] == "nan" else each["norm"] ** 2
    report = head(command, len(names), 16, elements)
    report |= {
        "run": RUN,
        "meshes": [{"name": "world", "dim_names": ["pp", "dp", "tp"], "shape": [2, 4, 2], "ranks": list(range(16)),
                    "device_mesh": True, "moe_mesh": False}]
        + [{"name": f"stage{s}", "dim_names": ["dp", "tp"], "shape": [4, 2], "ranks": list(range(8 * s, 8 * s + 8)),
            "device_mesh": False, "moe_mesh": False} for s in range(2)],
        "scale": {"label_token_divisor": 8192, "expert_divisor": None, "explanation": "all gradients / 8192"},
        "norm": {"type": 2, "total": json_number(total), "elements": elements,
                 "zeros": sum(each["zeros"] for each in parameters), "subnormals": 0, "nan": 17 * len(bad), "posinf": 0,
                 "neginf": 0, "max_abs": max(each["max_abs"] for each in parameters), "min_abs": 1e-12, "mean": 1e-9}}
    if command == "clip":
        report["clip"] = {"max_norm": 1.0, "coefficient": json_number(1 / total), "clipped": True,
                          "total_after": 1.0, "nonfinite": "propagate", "skipped": False}
    if histograms:
        sum_of_counts, casts = {}, {}
        for each in parameters:
            first = each["histogram"]["exponents"]["first"]
            for i, count in enumerate(each["histogram"]["exponents"]["counts"]):
                sum_of_counts[first + i] = sum_of_counts.get(first + i, 0) + count
            for name, counts in each["histogram"]["casts"].items():
                for what, count in counts.items():
                    casts.setdefault(name, {}).setdefault(what, 0)
                    casts[name][what] += count
        low, high = min(sum_of_counts), max(sum_of_counts)
        report["norm"]["histogram"] = {"exponents": {"first": low, "counts": [sum_of_counts.get(e, 0) for e in range(low, high + 1)]},
                               "zeros": sum(each["histogram"]["zeros"] for each in parameters), "nan": 0, "posinf": 0,
                               "neginf": 0, "casts": casts}
    report |= {
        "reference": {"arithmetic": "exact", "note": "", "totals": seen,
                      "recorded": {"grad_norm": json_number(total), "distance": 0.0, "distance_to_nearest_reference": 0.0}},
        "groups": [{"mesh": mesh, "placements": list(placements), "parameters": group["parameters"],
                    "elements": group["elements"], "bytes": 2 * group["elements"], "norm": math.sqrt(group["powers"]),
                    "share": json_number(math.nan if bad else group["powers"] / powers)}
                   for (mesh, placements), group in groups.items()],
        "stages": [{"stage": 0, "model_parts": [0]} | sums], "dtypes": [{"dtype": "bfloat16"} | sums],
        "parameters": parameters, "findings": findings}
    return report


def diff(layers=32, *, names=None, wrong_from=None, seed=7):
    """Two dumps that agree to rounding; from layer `wrong_from` on they do not."""
    random = np.random.default_rng(seed)
    report = head("diff", 0, 8, 10 ** 9)
    parameters, findings = [], []
    for name in names or model_names(layers):
        layer = int(name.split(".")[2]) if name.count(".") > 2 else layers if name.startswith("lm_head") else -1
        wrong = wrong_from is not None and layer >= wrong_from
        error = (3e-2 if wrong else 6e-4) * math.exp(0.3 * random.standard_normal())
        parameters.append(
            {"name": name, "status": "differs" if wrong else "equal", "shape": [4096, 1024], "dtype": "bfloat16",
             "dtype_in_other": "float32", "rtol": 2 ** -7, "elements": 1 << 22, "different": int(error * (1 << 22)) if wrong else 0,
             "nan_different": 0, "none_different": 0, "first_different": [0, 17] if wrong else None,
             "max_abs": {"value": error * 1e-3, "index": [12, 40]}, "max_rel": {"value": 20 * error, "index": [7, 7]},
             "relative_l2": error, "relative_l2_epsilons": error * 128, "cosine": 1 - error ** 2 / 2, "norm_ratio": 1 + error / 3,
             "worst": [{"index": [12, 40], "a": 0.25, "b": 0.25 + error}] if wrong else []})
        if wrong:
            findings.append(finding("differs", name, [], [12, 40], error * 1e-3, f"{parameters[-1]['different']:,} of 4,194,304 elements differ"))
    report["dump"]["parameters"] = len(parameters)
    first = next((each for each in parameters if each["status"] != "equal"), None)
    report |= {"other": report["dump"] | {"path": "/data/run-18/step-100"}, "run": RUN,
               "rule": {"rtol": None, "atol": 0, "ulp": None, "equal_nan": False}, "parameters": parameters,
               "first_difference": first and {"name": first["name"], "status": first["status"], "index": first["first_different"]},
               "findings": findings}
    return report


def verify(findings=None, world_size=64):
    if findings is None:
        findings = [finding("missing", None, [9], message="rank_00009.h5 is not there"),
                    finding("checksum", "model.layers.3.mlp.up_proj.weight", [4], message="the dataset has XXH3-64 0x1f, recorded is 0x2e"),
                    finding("checksum", "model.layers.4.mlp.up_proj.weight", [4, 5], message="the dataset has XXH3-64 0x1f, recorded is 0x2e")]
        findings += [finding("replicas-differ", f"model.layers.{i}.input_layernorm.weight", [2 * (i % 16), 2 * (i % 16) + 1], [i],
                             0.0625, "copies differ; the sum of the two is what a reduced gradient would be") for i in range(40)]
    return head("verify", 291, world_size, 10 ** 9) | {
        "run": RUN, "checked": {"manifest": True, "files": world_size - 1, "shards": 291 * (world_size - 1)},
        "checksums": {"manifest": True, "files": world_size, "shards": 0}, "findings": findings}


def check(outcome=None):
    """Norms against a baseline; every seventh parameter's is another one unless the outcome says that all is well."""
    items = [{"parameter": None, "item": "norm", "status": "passed", "expected": 7.5, "found": 7.5, "deviation": 0, "allowed": 7.5e-6},
             {"parameter": None, "item": "zeros", "status": "passed", "expected": 7355310, "found": 7355311, "deviation": 1e-7, "allowed": 7}]
    findings = []
    for i, name in enumerate(model_names(4)):
        wrong = outcome is None and i % 7 == 0
        items += [{"parameter": name, "item": "shape", "status": "passed", "expected": [4, 8], "found": [4, 8], "deviation": None, "allowed": None},
                  {"parameter": name, "item": "norm", "status": "failed" if wrong else "passed", "expected": 0.5,
                   "found": 0.75 if wrong else 0.5, "deviation": 0.5 if wrong else 0, "allowed": 5e-7}]
        if wrong:
            findings.append(finding("differs", name, value=0.5, message="the norm is 0.75, the baseline has 0.5"))
    failed = sum(item["status"] == "failed" for item in items)
    report = norms(layers=4, command="check")
    for key in ("groups", "stages", "dtypes", "parameters", "meshes"):
        del report[key]
    return report | {
        "outcome": outcome or "regressed", "summary": f"gradclip check: {outcome or 'regressed'}: {len(findings)} findings",
        "baseline_path": "norms.json", "baseline": {"step": 100, "norm_type": 2, "numerics": "exact", "rtol": 1e-6, "atol": 0},
        "counts": {"items_passed": len(items) - failed, "items_failed": failed}, "items": items,
        "known_findings": [{"kind": "replicas-differ", "parameter": "model.norm.weight", "seen": False}], "changes": [],
        "findings": findings}


def sweep(steps=30):
    totals = [1.0 + 0.1 * i if i != 7 else math.nan for i in range(steps)]
    lines = []
    for limit in (0.5, 1.0, 2.0, 4.0):
        coefficients = sorted(min(1.0, limit / total) for total in totals if math.isfinite(total))
        lines.append({"max_norm": limit, "clipped": sum(each < 1 for each in coefficients), "steps": len(coefficients),
                      "coefficient": {"min": coefficients[0], "median": coefficients[len(coefficients) // 2],
                                      "mean": sum(coefficients) / len(coefficients)}})
    return {"format": "gradclip.report", "version": 1, "command": "norms", "run": RUN,
            "steps": [{"path": f"/data/run-17/step-{i}", "step": i, "type": 2, "total": json_number(total), "findings": 0}
                      for i, total in enumerate(totals)],
            "nonfinite_steps": 1, "sweep": lines, "findings": []}


def tokens(ranks=300):
    counts = {"sequences": 4, "elements": 4096, "label_tokens": 4000, "tail_padding": 90}
    return head("tokens", 291, ranks) | {
        "run": RUN, "labels": counts | {"ignore_index": -100, "coordinates": ranks, "coordinates_counted": ranks},
        "microbatches": [counts] * 8, "ranks": [{"rank": r, "coordinate": r // 2, "counted": r % 2 == 0, "microbatches": 8} | counts
                                                | {"label_tokens": 4000 - r} for r in range(ranks)], "findings": []}


def accumulate(microbatches=24):
    return head("accumulate", 291, 8) | {
        "accumulated": {"microbatches": str(microbatches), "windows": "2"}, "output": {"path": "/data/out"}, "run": RUN,
        "microbatches": [{"index": k, "first_microbatch": k == 0, "optimizer_step": None, "synchronised": None,
                          "schedule_step": k // 4, "ends_window": k % 12 == 11} for k in range(microbatches)], "findings": []}


def merge(names=None):
    return head("merge", 291, 8) | {
        "output": "/data/merged.safetensors", "run": RUN, "merged_as": "safetensors", "merged_bytes": 1 << 30, "not_kept": ["labels"],
        "parameters": [{"name": name, "name_in_output": name + "@2", "status": "written", "shape": [4, 8], "dtype": "bfloat16",
                        "dtype_in_output": "float32", "scale_inv": None, "elements": 32, "bytes": 64 + i}
                       for i, name in enumerate(names or model_names(16))], "findings": []}
