package plan

import (
	"math"
	"slices"
	"testing"
	"time"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/roads"
)

// compared returns the roads of a request at the rates of a machine.
func compared(t *testing.T, q job.Request, o job.Offload, rates roads.Rates) *Roads {
	t.Helper()
	j, err := q.Resolve()
	if err != nil {
		t.Fatal(err)
	}
	offload, err := o.Decide(j)
	if err != nil {
		t.Fatal(err)
	}
	r, err := NewRoads(j, offload, rates, roads.Job{})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func roadOf(t *testing.T, r *Roads, name string) *Road {
	t.Helper()
	i := slices.IndexFunc(r.Roads, func(road Road) bool { return road.Name == name })
	if i < 0 {
		t.Fatalf("there is no road %q", name)
	}
	return &r.Roads[i]
}

// TestDeepSeekV3: Megatron-LM's authors save 15 to 20 GB of each GPU on DeepSeek-V3 (pull requests 2760 and 2811), and
// do not print the layout. 256 GB200 are consistent with it, over which the distributed optimizer divides all states,
// with precision-aware bf16 moments: 6 bytes a parameter where master weights are 16-bit remainders, 8 with fp32 ones.
func TestDeepSeekV3(t *testing.T) {
	const gigabyte = 1e9
	for _, test := range []struct {
		master string
		bytes  float64
	}{{"split", 6}, {"fp32", 8}} {
		q := job.Request{Model: "deepseek-v3", GPUs: 4, Nodes: 64, GPU: "B200", FSDP: "2", Precision: "bf16",
			Sequence: 4096, Recompute: "full"}
		r := compared(t, q, job.Offload{Master: test.master, Moments: "bf16"}, roads.Rates{})
		for _, name := range []string{ChunkedRoad, WholeRoad} {
			freed := float64(roadOf(t, r, name).Freed) / gigabyte
			// The chunks leave two slots on the GPU, of 4096 x 7168 parameters of an expert each.
			window := 0.0
			if name == ChunkedRoad {
				window = 2 * 4096 * 7168 * test.bytes / gigabyte
			}
			if want := 671e9/256*test.bytes/gigabyte - window; freed < want*0.99 || freed > want*1.01 {
				t.Errorf("%s master weights, %s: %.2f GB of a GPU are freed, want %.2f", test.master, name, freed, want)
			}
			if freed < 15 || freed > 21 { // 19.5 GiB are 21.0 GB
				t.Errorf("%s master weights, %s: %.2f GB, and Megatron-LM's authors say 15 to 20", test.master, name,
					freed)
			}
		}
	}
}

// TestRoadsNeedRates: without rates nothing is said of time, and what is missing has a name.
func TestRoadsNeedRates(t *testing.T) {
	q := job.Request{Model: "qwen2.5-0.5b", Precision: "bf16", Sequence: 512, Optimizer: "muon"}
	r := compared(t, q, job.Offload{}, roads.Rates{})
	if len(r.Missing) != 5 || r.Best != nil {
		t.Errorf("missing %q, best %v", r.Missing, r.Best)
	}
	m, err := roads.FindMachine("gh200")
	if err != nil {
		t.Fatal(err)
	}
	r = compared(t, q, job.Offload{}, m.Rates)
	if len(r.Missing) != 0 || r.Best == nil || r.Best.Name != ResidentRoad {
		t.Errorf("missing %q, best %v", r.Missing, r.Best)
	}
}

// TestRoadsBytes compares bytes a parameter with the formats: 10 for states and split master weights, 4 for recovery.
func TestRoadsBytes(t *testing.T) {
	q := job.Request{Model: "llama-3.2-1b", Precision: "bf16", Sequence: 512, GPUs: 2, FSDP: "2", GPU: "H100-80GB"}
	m, err := roads.FindMachine("8xh100")
	if err != nil {
		t.Fatal(err)
	}
	r := compared(t, q, job.Offload{Master: "split"}, m.Rates)
	const parameters, embedding = 1_235_814_400, 128256 * 2048
	chunked, cpu := roadOf(t, r, ChunkedRoad), roadOf(t, r, CPURoad)
	for _, figure := range []struct {
		what      string
		got, want float64
	}{
		{"host", float64(chunked.Host), 14*parameters + 12*embedding}, // the gap of each rank is half an embedding
		{"window", float64(chunked.Window), 2 * 10 * embedding / 2},
		{"freed", float64(chunked.Freed), 10*parameters/2 - 10*embedding},
		{"freed in mode whole", float64(roadOf(t, r, WholeRoad).Freed), 10 * parameters / 2},
		{"host in mode whole", float64(roadOf(t, r, WholeRoad).Host), 24 * parameters},
		{"CPU step", float64(cpu.Host), 14 * parameters},
		{"pinned for a CPU step", float64(cpu.Pinned), 4 * parameters},
		{"states on the GPU", float64(roadOf(t, r, ResidentRoad).Window), 10 * parameters / 2},
		{"pinned by Megatron", float64(r.Megatron[0].Pinned), 10 * parameters / 2}, // tensors of powers of two
		{"Megatron's window", float64(r.Megatron[1].Step), 2*8*embedding/2 + 2*parameters/2},
	} {
		if off := figure.got/figure.want - 1; off < -0.005 || off > 0.005 {
			t.Errorf("%s: %.0f bytes, want %.0f", figure.what, figure.got, figure.want)
		}
	}
}

// TestDisks: on the road over disks the host holds parameters, gradients and a window, and a step takes as long as the
// slower of memory and disks: 22 bytes a parameter, over the disks of the node. What the memory keeps is not read.
func TestDisks(t *testing.T) {
	q := job.Request{Model: "llama-3.2-1b", Precision: "bf16", Sequence: 512, GPUs: 2, FSDP: "2", GPU: "H100-80GB"}
	m, err := roads.FindMachine("8xh100")
	if err != nil {
		t.Fatal(err)
	}
	const parameters = 1_235_814_400
	tier := job.Tier{Disks: 2, Memory: 256 * ledger.MiB}
	for _, test := range []struct {
		memory              ledger.Bytes
		host, disk, seconds float64
	}{
		{tier.Memory, 4, 4e9, 22 * parameters / 4e9}, {tier.Memory, 4, 1e15, 0},
		{13 * ledger.GiB, 14, 4e9, 12 * parameters / 4e9},
		{6 * ledger.GiB, 4 + float64(5*ledger.GiB)/parameters, 4e9, (22*parameters - float64(5*ledger.GiB)) / 4e9},
	} {
		m.Rates.Disk, tier.Memory = test.disk, test.memory
		r := compared(t, q, job.Offload{Master: "split", Tier: tier}, m.Rates)
		memory, disks := roadOf(t, r, CPURoad), roadOf(t, r, DiskRoad)
		if host := float64(disks.Host) / parameters; host < test.host-0.1 || host > test.host+0.2 {
			t.Errorf("disks: %.3f bytes a parameter on the host, want %.3f and a window", host, test.host)
		}
		want := max(memory.Step.Exposed.Seconds(), test.seconds)
		if got := disks.Step.Exposed.Seconds(); got < want*0.99 || got > want*1.02 {
			t.Errorf("disks of %.0f GB/s: the trainer waits %.3g s, want %.3g", test.disk/1e9, got, want)
		}
		behind := roadOf(t, r, DiskRoad+", overlap forward")
		if behind.Step.Exposed > disks.Step.Exposed {
			t.Errorf("behind the forward pass the trainer waits %v, without overlap %v", behind.Step.Exposed,
				disks.Step.Exposed)
		}
	}
	if r := compared(t, q, job.Offload{Master: "split", Tier: tier}, roads.Rates{}); !slices.Contains(r.Missing,
		"the disks (--disk-bandwidth)") {
		t.Errorf("missing %q, and nobody says how fast the disks are", r.Missing)
	}
}

// TestStepOfHeldStates compares the peak of a step with what the client says of its window: two slots, and gradients
// and parameters of the largest chunk in fp32. A fused AdamW makes nothing beside them.
func TestStepOfHeldStates(t *testing.T) {
	const embedding, block = 151936 * 896, 512
	for _, test := range []struct {
		name   string
		o      job.Offload
		window map[ledger.Component]ledger.Bytes
	}{
		{"split", job.Offload{Master: "split"}, map[ledger.Component]ledger.Bytes{
			ledger.StatesWindow: 2 * 10 * embedding, ledger.DtypeConversions: 8 * embedding}},
		{"fp32", job.Offload{Master: "fp32"}, map[ledger.Component]ledger.Bytes{
			ledger.StatesWindow: 2 * 12 * embedding, ledger.DtypeConversions: 4*embedding + 3<<20}},
		{"no master weights", job.Offload{}, map[ledger.Component]ledger.Bytes{
			ledger.StatesWindow: 2 * 4 * embedding, ledger.DtypeConversions: 0}},
		{"bf16 moments", job.Offload{Master: "split", Moments: "bf16"}, map[ledger.Component]ledger.Bytes{
			ledger.StatesWindow: 2 * 6 * embedding, ledger.DtypeConversions: 16 * embedding}},
	} {
		test.o.What = job.OffloadStates
		p := planned(t, job.Request{Model: "qwen2.5-0.5b", Precision: "bf16", Sequence: 64, Optimizer: "adamw/fused",
			Offload: test.o})
		phases := p.Devices[0].Phases
		step := &phases[slices.IndexFunc(phases, func(p ledger.Phase) bool {
			return p.Name == ledger.Step && p.Iteration == ledger.Steady
		})]
		for component, want := range test.window {
			got := ledger.Bytes(0)
			for _, h := range step.Components {
				if h.Component == component {
					got = h.Bytes
				}
			}
			if got != want && got != want+3*block { // a number of steps in each slot, and the counter
				t.Errorf("%s: %s has %v, want %v", test.name, component, got.Exact(), want.Exact())
			}
		}
		for _, h := range phaseOf(t, &p.Devices[0], ledger.Checkpoint).End {
			if h.Component == ledger.OptimizerStates {
				t.Errorf("%s: %v of states stay on the GPU", test.name, h.Bytes)
			}
		}
	}
}

// TestClippedStepBehindTheBackwardPass: the client makes it on one rank, with fp32 moments. It takes a log of a byte a
// parameter, and the time of memory, unless cores compute longer. Without clipping it takes no log.
func TestClippedStepBehindTheBackwardPass(t *testing.T) {
	clip := func(norm float64) *float64 { return &norm }
	for _, test := range []struct {
		name  string
		q     job.Request
		host  float64 // GB/s
		bytes float64 // a parameter, of the host; 0 for no such road
		slow  float64 // how many times longer the update takes
	}{
		{"clipped", job.Request{}, 71, 1, 31. / 30},
		{"not clipped", job.Request{Clip: clip(0)}, 71, 0, 1},
		{"fast memory", job.Request{}, 486, 1, 1.7 / 8 / (30. / 486)},
		{"several ranks", job.Request{GPUs: 2, FSDP: "2"}, 71, -1, 0},
		{"several ranks, not clipped", job.Request{GPUs: 2, FSDP: "2", Clip: clip(0)}, 71, -1, 0},
		{"bf16 moments", job.Request{Offload: job.Offload{Moments: "bf16"}}, 71, -1, 0},
		{"Arm", job.Request{GPU: "GH200"}, 71, -1, 0},
	} {
		test.q.Model, test.q.Precision, test.q.Sequence = "llama-3.2-1b", "bf16", 1024
		offload := test.q.Offload
		test.q.Offload = job.Offload{}
		if test.q.GPU == "" {
			test.q.GPU = "RTX-4090"
		}
		offload.Master = "split"
		found := compared(t, test.q, offload, roads.Rates{Link: roads.Link{In: 1e12, Out: 1e12}, Host: test.host * 1e9,
			Device: 1e12, FLOPS: 1e14})
		at := slices.IndexFunc(found.Roads, func(r Road) bool { return r.Name == BackwardRoad })
		if at < 0 || test.bytes < 0 {
			if at >= 0 || test.bytes >= 0 {
				t.Errorf("%s: %d is the place of the road", test.name, at)
			}
			continue
		}
		road, serial := found.Roads[at], found.Roads[0]
		log := float64(road.Host-serial.Host) / float64(found.Job.Model.Elements())
		slow := road.Step.Update.Seconds() / serial.Step.Update.Seconds()
		if math.Abs(log-test.bytes) > 1e-3 || math.Abs(slow/test.slow-1) > 1e-3 {
			t.Errorf("%s: %.4f bytes a parameter, and %.4f times the update", test.name, log, slow)
		}
	}
}

// TestPassTimes: a token takes 6 operations a parameter that it is multiplied by, and 8 with recomputed activations.
func TestPassTimes(t *testing.T) {
	q := job.Request{Model: "qwen3-30b-a3b", Precision: "bf16", Sequence: 4096, FSDP: "2", GPUs: 8, Recompute: "full"}
	j, err := q.Resolve()
	if err != nil {
		t.Fatal(err)
	}
	forward, backward := passTimes(j, 400e12)
	active := forward.Seconds() * 400e12 / 2 / 4096
	if active < 2.9e9 || active > 3.1e9 { // 3.3 billion with the embedding
		t.Errorf("a token is multiplied by %.3g parameters", active)
	}
	if off := backward - 3*forward; off.Abs() > time.Microsecond {
		t.Errorf("backward takes %v, forward %v", backward, forward)
	}
}
