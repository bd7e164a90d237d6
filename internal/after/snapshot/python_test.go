package snapshot

import (
	"encoding/json"
	"testing"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/torchtest"
)

// writeSnapshots makes random snapshots as PyTorch's versions wrote them, pickles each in every protocol, and prints
// what torch.cuda._memory_viz and plain sums find in them.
const writeSnapshots = `
import io, json, pickle, random, re, sys
from torch.cuda import _memory_viz as viz

def frames(rng, table):
    return [rng.choice(table) for _ in range(rng.randrange(6))]

def segment(rng, address, table, version):
    blocks, at = [], address
    for _ in range(rng.randrange(1, 12)):
        requested = rng.choice([1, 511, 512, 4096, 3 << 20, 77_777_777, 5 << 30])
        size = (requested + 511) // 512 * 512
        state = rng.choice(["active_allocated", "active_pending_free", "inactive"])
        if version == "history":
            block = {"size": size, "state": state}
            if state != "inactive":
                block["history"] = [{"addr": at, "real_size": requested, "frames": frames(rng, table)},
                                    {"addr": at, "real_size": 1}][:rng.randrange(1, 3)]
        else:
            block = {"address": at, "size": size, "requested_size": requested, "state": state,
                     "frames": frames(rng, table)}
        blocks.append(block)
        at += size
    out = {"device": 0, "address": address, "total_size": at - address, "stream": rng.choice([0, 2**63 + 5]),
           "segment_type": rng.choice(["large", "small"]), "blocks": blocks, "allocated_size": 0, "active_size": 0}
    if version != "history":
        out |= {"segment_pool_id": (0, rng.randrange(2)), "is_expandable": False, "frames": [], "requested_size": 0}
    return out

def snapshot(seed):
    rng = random.Random(seed)
    version = rng.choice(["list", "history", "new"])
    table = [{"filename": f"/x/{n}.py", "line": n, "name": f"f{n}"} for n in range(9)]
    segments = [segment(rng, base << 36, table, "history" if version != "new" else "new")
                for base in range(rng.randrange(1, 5))]
    segments[0]["address"] += 2**63 if seed % 3 else 0
    for b in segments[0]["blocks"]:
        if "address" in b and seed % 3:
            b["address"] += 2**63
    if version == "list":
        return segments
    trace, time = [], 1_700_000_000_000_000
    for n in range(rng.randrange(2500)):
        entry = {"action": "alloc" if n % 3 else "segment_alloc", "addr": (1 << 50) + n * 4096, "size": rng.randrange(4096),
                 "stream": 0, "frames": frames(rng, table), "time_us": time + n}
        if version == "new":
            entry |= {"compile_context": "N/A", "user_metadata": "é" * rng.randrange(99), "pool_id": (0, 0)}
        trace.append(entry)
        if n % 3 and rng.randrange(2):
            trace += [dict(entry, action="free_requested"), dict(entry, action="free_completed")]
    s = {"segments": segments, "device_traces": [[], trace]}
    if version == "new":
        s["allocator_settings"] = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "max_split_size": -1,
            "garbage_collection_threshold": 0.0, "expandable_segments": True, "roundup_power2_divisions": {"1": 0}}
        s["external_annotations"] = [{"device": 0, "time_us": time, "name": "Optimizer.step#AdamW.step",
            "stage": "START"}]
    return s

folder, results = sys.argv[1], []
for seed in range(60):
    s = snapshot(seed)
    full = s if isinstance(s, dict) else {"segments": s}
    blocks = [b for g in full["segments"] for b in g["blocks"]]
    allocated = [b for b in blocks if b["state"] == "active_allocated"]
    lines = []
    viz.memory(full, format_flamegraph=lines.append)  # what PyTorch's flame graph adds up
    flame = sum(int(l.rsplit(" ", 1)[1]) for l in lines[0].splitlines())
    trace = full.get("device_traces", [[], []])[1]
    for protocol in (2, 3, 4, 5):
        name = f"{folder}/{seed}-{protocol}.pickle"
        with open(name, "wb") as f:
            pickle.dump(s, f, protocol=protocol)
        results.append({"File": name, "Flame": flame, "Reserved": sum(g["total_size"] for g in full["segments"]),
            "Allocated": sum(b["size"] for b in allocated),
            "Requested": sum(viz._block_extra(b)[1] if "frames" in b else b["history"][0]["real_size"] for b in allocated),
            "Entries": len(trace), "Traced": sum(e["size"] for e in trace if e["action"] == "alloc"),
            "Frames": sum(len(e["frames"]) for e in trace)})
print(json.dumps(results))
`

// expectation is what Python found in a file.
type expectation struct {
	File                                                           string
	Flame, Reserved, Allocated, Requested, Entries, Traced, Frames int64
}

// profile is what PyTorch's profiler said of a training.
type profile struct {
	File               string
	Requested, Entries int64
	Categories         map[ledger.Component]ledger.Bytes
}

func runPython(t *testing.T, script string) []byte {
	t.Helper()
	out, err := torchtest.Imported(t, "torch", "torch.cuda._memory_viz").Output("-c", script, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// TestPythonsPickles holds the reader against Python's picklers of all protocols and against torch.cuda._memory_viz.
func TestPythonsPickles(t *testing.T) {
	var all []expectation
	if err := json.Unmarshal(runPython(t, writeSnapshots), &all); err != nil || len(all) < 200 {
		t.Fatal(len(all), err)
	}
	for _, expected := range all {
		s, err := Open(expected.File)
		if err != nil {
			t.Fatal(err)
		}
		got := expectation{File: expected.File}
		for i := range s.segments {
			got.Reserved += int64(s.segments[i].Size)
			for b := range s.Blocks(&s.segments[i]) {
				got.Flame += int64(b.Size)
				if b.State == Allocated {
					got.Allocated, got.Requested = got.Allocated+int64(b.Size), got.Requested+int64(b.Requested)
				}
			}
		}
		if len(s.traces) == 2 {
			for n := s.traces[1].first; n < s.traces[1].last; n++ {
				e := s.events.at(n)
				got.Entries++
				got.Frames += int64(len(s.stacks.of(e.stack)))
				if e.Action == Alloc {
					got.Traced += int64(e.Size)
				}
			}
		}
		if got != expected {
			t.Errorf("found %+v\nexpected %+v", got, expected)
		}
	}
}

// checkStacks finds the components of a profile by the stacks alone, and compares them with PyTorch's categories, which
// its profiler finds by the tensors. Its temporaries of the backward pass are no category of their own.
func checkStacks(t *testing.T, d *Device) {
	checked := 0
	for i := range d.Entries() {
		e := d.event(i)
		category := categoryNames[e.category]
		if e.Action != Alloc || e.stack == emptyStack {
			continue
		}
		e.category = 0
		got := d.component(holding{e.Size, e.stack, i})
		expected := map[string]ledger.Component{"gradient": ledger.Gradients, "optimizer_state": ledger.OptimizerStates,
			"autograd_detail": ledger.ActivationGradients}[category]
		if expected == "" {
			continue
		}
		if checked++; got != expected {
			t.Errorf("entry %d of %v, which PyTorch calls %s: %s, expected %s", i, e.Size, category, got, expected)
		}
	}
	if checked < 20 {
		t.Errorf("only %d allocations were checked", checked)
	}
}

// profiled trains a model on the CPU under torch.profiler, and pickles the snapshot that PyTorch makes of the profile.
const profiled = `
import json, pickle, sys, torch
from torch.cuda._memory_viz import _profile_to_snapshot
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
optimizer = torch.optim.AdamW(model.parameters())
with torch.profiler.profile(profile_memory=True, record_shapes=True, with_stack=True) as prof:
    for _ in range(3):
        model(torch.randn(64, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
snapshot = _profile_to_snapshot(prof)
with open(sys.argv[1] + "/profiled.pickle", "wb") as f:
    pickle.dump(snapshot, f)
live, held = {}, {}
for e in snapshot["device_traces"][0]:
    if e["action"] == "alloc":
        live[e["addr"]] = e
    elif e["action"] == "free_requested":
        live.pop(e["addr"], None)
names = {"parameter": "parameters", "optimizer_state": "optimizer_states", "gradient": "gradients"}
for e in live.values():
    if e["category"] in names:
        held[names[e["category"]]] = held.get(names[e["category"]], 0) + e["size"]
blocks = [b for g in snapshot["segments"] for b in g["blocks"] if b["state"] == "active_allocated"]
print(json.dumps({"File": f.name, "Requested": sum(b["requested_size"] for b in blocks),
    "Entries": len(snapshot["device_traces"][0]), "Categories": held}))
`

// TestRealProfile reads a snapshot that PyTorch made of a real training.
func TestRealProfile(t *testing.T) {
	var expected profile
	if err := json.Unmarshal(runPython(t, profiled), &expected); err != nil {
		t.Fatal(err)
	}
	s, err := Open(expected.File)
	if err != nil {
		t.Fatal(err)
	}
	devices, err := s.Devices()
	if err != nil || len(devices) != 1 {
		t.Fatal(len(devices), err)
	}
	d := devices[0]
	if int64(d.Requested) != expected.Requested || int64(d.Entries()) != expected.Entries || expected.Entries < 50 {
		t.Errorf("%v requested in %d entries, expected %+v", d.Requested, d.Entries(), expected)
	}
	held := map[ledger.Component]ledger.Bytes{}
	for _, h := range ByComponent(d.Holders(d.Dump.Entry)) {
		held[h.Component] = h.Bytes
	}
	for component, expected := range expected.Categories {
		if held[component] != expected {
			t.Errorf("%s: %v, expected %v", component, held[component], expected)
		}
	}
	if len(expected.Categories) == 0 {
		t.Error("PyTorch told no categories")
	}
	checkStacks(t, d)
}
