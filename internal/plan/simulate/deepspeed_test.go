package simulate

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/version"
	"plimsoll/internal/input/model"
	"plimsoll/internal/input/recipe/deepspeed"
	"plimsoll/internal/input/recipe/peft"
	"plimsoll/internal/plan/autograd"
	"plimsoll/internal/plan/forward"
	"plimsoll/internal/plan/job"
)

// deepSpeedJob returns a job with a DeepSpeed configuration, in bf16 on one rank.
func deepSpeedJob(t testing.TB, m *model.Model, config, release string) *job.Job {
	t.Helper()
	d, err := deepspeed.Parse("ds.json", []byte(config), version.Version{})
	if err != nil {
		t.Fatal(err)
	}
	v, err := version.Parse(release)
	if err != nil {
		t.Fatal(err)
	}
	j := &job.Job{Model: m,
		Machine:   job.Machine{World: 1, Nodes: 1, RanksPerNode: 1},
		Batch:     job.Batch{MicroBatch: 1, Sequence: 128, Accumulation: 1},
		Precision: job.Precision{ParameterType: d.Precision},
		Update:    job.Update{Optimizer: job.NewOptimizer("adamw", job.Foreach)},
		Sharding: job.Sharding{DeepSpeed: d,
			Parallel: job.Parallel{Degrees: forward.Degrees{Tensor: 1, Context: 1}, Expert: 1, Shard: 1}},
		Program: job.Program{Versions: job.Versions{Torch: version.Version{Major: 2, Minor: 9}, DeepSpeed: v}}}
	j.Attention = forward.SDPA
	j.Settle()
	return j
}

// onRanks moves the job to a node of so many ranks.
func onRanks(n int, j *job.Job) *job.Job {
	j.World, j.RanksPerNode, j.Parallel.Shard = n, n, int64(n)
	return j
}

// simulated runs a job whose settings a test may have changed.
func simulated(j *job.Job) *simulation {
	j.Settle()
	s := newSimulation(j, &trace{strict: true}, &trace{strict: true})
	s.run()
	return s
}

// ends returns what a trace holds at the end of a phase.
func ends(t testing.TB, tr *trace, name ledger.PhaseName, iteration ledger.Iteration) map[ledger.Component]int64 {
	t.Helper()
	for _, p := range tr.phases() {
		if p.Name == name && p.Iteration == iteration {
			held := map[ledger.Component]int64{}
			for _, c := range p.End {
				held[c.Component] = int64(c.Bytes)
			}
			return held
		}
	}
	t.Fatalf("no phase %s %s", name, iteration)
	return nil
}

func total(held map[ledger.Component]int64, but ...ledger.Component) int64 {
	var sum int64
	for _, bytes := range held {
		sum += bytes
	}
	for _, name := range but {
		sum -= held[name]
	}
	return sum
}

func catalog(t testing.TB, name string) *model.Model {
	t.Helper()
	m, err := model.Load(name)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func zero(stage int, section string) string {
	return fmt.Sprintf(`{"train_batch_size": 16, "bf16": {"enabled": true}, "zero_optimization": {"stage": %d%s}}`,
		stage, section)
}

// TestDeepSpeedHostBytes compares the host's bytes per parameter of the rank's
// shard with the sums in DeepSpeed issue 7693 and in DeepSpeed's source.
func TestDeepSpeedHostBytes(t *testing.T) {
	const unpinned = `, "offload_optimizer": {"device": "cpu", "pin_memory": false}`
	for _, test := range []struct {
		name, config, release   string
		accumulation            int
		initialized, steady     int64              // bytes per parameter
		beside                  []ledger.Component // components that do not grow with the shard
		shared                  int64              // bytes per parameter of steady in /dev/shm
		lowPrecision, lowStates bool
	}{
		{"7693", zero(2, unpinned), "0.18.3", 1, 10, 18, []ledger.Component{ledger.StagingBuffers}, 0, false, false},
		{"7693, accumulating", zero(2, unpinned), "0.18.3", 4, 10, 20, []ledger.Component{ledger.StagingBuffers}, 0,
			false, false},
		{"before the staging buffer", zero(2, unpinned), "0.14.0", 1, 8, 16,
			[]ledger.Component{ledger.StagingBuffers, ledger.AdamTiles}, 0, false, false},
		{"states from the start", zero(2, unpinned), "0.13.1", 1, 16, 16,
			[]ledger.Component{ledger.StagingBuffers, ledger.AdamTiles}, 0, false, false},
		{"ZeRO-1", zero(1, unpinned), "0.19.6", 1, 10, 18, []ledger.Component{ledger.StagingBuffers}, 0, false, false},
		{"low precision", zero(2, unpinned), "0.19.6", 4, 6, 14, []ledger.Component{ledger.StagingBuffers}, 0, true,
			false},
		{"low precision states", zero(2, unpinned), "0.19.6", 1, 6, 10, []ledger.Component{ledger.StagingBuffers}, 0,
			true, true},
		{"ZeRO-3", zero(3, unpinned), "0.19.6", 1, 10, 18, nil, 0, false, false},
		{"ZeRO-3, accumulating", zero(3, unpinned), "0.19.6", 4, 10, 18, nil, 0, false, false},
		{"ZeRO-3 with parameters", zero(3, unpinned+`, "offload_param": {"device": "cpu", "pin_memory": false}`),
			"0.19.6", 1, 12, 20, []ledger.Component{ledger.PinnedRounding}, 0, false, false},
		{"ZenFlow", zero(2, unpinned+`, "zenflow": {"topk_ratio": 0.1, "update_interval": 4}`), "0.19.6", 4, 10, 20,
			[]ledger.Component{ledger.StagingBuffers}, 0, false, false},
		{"ZenFlow, overlapped",
			zero(2, unpinned+`, "zenflow": {"topk_ratio": 0.1, "overlap_step": true, "update_interval": 4}`), "0.19.6",
			1, 18, 34, []ledger.Component{ledger.StagingBuffers, ledger.AccumulatedGradients}, 16, false, false},
		{"SuperOffload",
			zero(3, `, "offload_optimizer": {"device": "cpu", "pin_memory": false, "super_offload": true}`), "0.19.6",
			1, 10, 18, []ledger.Component{ledger.StagingBuffers, ledger.PinnedRounding}, 8, false, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			m := catalog(t, "llama-3.2-1b")
			j := deepSpeedJob(t, m, test.config, test.release)
			j.Accumulation = test.accumulation
			j.DeepSpeed.LowPrecisionMaster, j.DeepSpeed.LowPrecisionState = test.lowPrecision, test.lowStates
			s := simulated(j)
			n := m.Elements()
			if got := total(ends(t, s.host, ledger.Initialize, ledger.Once),
				test.beside...); got != test.initialized*n {
				t.Errorf("initialized: %.3f B a parameter, want %d", float64(got)/float64(n), test.initialized)
			}
			held := ends(t, s.host, ledger.Step, ledger.Steady)
			if got := total(held, test.beside...); got != test.steady*n {
				t.Errorf("steady: %.3f B a parameter, want %d: %v", float64(got)/float64(n), test.steady, held)
			}
			if got := held[ledger.SharedMasterWeights] + held[ledger.SharedMasterGradients] +
				held[ledger.SharedStaleParameters]; got != test.shared*n {
				t.Errorf("%.3f B a parameter in /dev/shm, want %d", float64(got)/float64(n), test.shared)
			}
		})
	}
}

// TestDeepSpeedPinning tests the blocks of pinned tensors, and which tensors are
// pinned.
func TestDeepSpeedPinning(t *testing.T) {
	const GiB = int64(ledger.GiB)
	m := catalog(t, "llama-3.2-1b")
	for _, test := range []struct{ bytes, block int64 }{{9 * GiB / 4, 4 * GiB}, {6 * GiB, 8 * GiB},
		{10 * GiB, 16 * GiB}, {12 * GiB, 16 * GiB}, {33 * GiB, 64 * GiB}, {8 * GiB, 8 * GiB}} {
		s := newSimulation(deepSpeedJob(t, m, zero(2, ""), "0.18.2"), newTrace(nil), newTrace(nil))
		p := newPinnedMemory(s.Job, s.host)
		l := p.allocate(test.bytes, ledger.MasterWeights, because("a test"))
		if got := int64(s.host.live); got != test.block {
			t.Errorf("%d bytes take %d, want %d", test.bytes, got, test.block)
		}
		l.free() // the allocator keeps the block
		if got := int64(s.host.live); got != test.block {
			t.Errorf("freed: %d bytes, want %d", got, test.block)
		}
		p.allocate(test.bytes, ledger.MasterWeights, because("a test"))
		if got := int64(s.host.live); got != test.block {
			t.Errorf("again: %d bytes, want %d", got, test.block)
		}
	}

	// Issue 7693 found 2 B per parameter more than was requested, for 3 x 2^30
	// parameters: the rounding of the master weights and of the staging buffer.
	s := newSimulation(deepSpeedJob(t, m, zero(2, ""), "0.18.2"), newTrace(nil), newTrace(nil))
	p := newPinnedMemory(s.Job, s.host)
	p.allocate(12*GiB, ledger.MasterWeights, because("a test"))
	p.allocate(6*GiB, ledger.Bit16Staging, because("a test"))
	if got := int64(s.host.held[s.host.component(ledger.PinnedRounding, nil)]); got != 2*3*GiB {
		t.Errorf("%d bytes beyond, want 2 B a parameter", got)
	}

	// Pinning depends on the version and on the file.
	const offload = `, "offload_optimizer": {"device": "cpu"%s}`
	for _, test := range []struct {
		key, release string
		rounded      bool
	}{
		{"", "0.19.6", true}, {"", "0.19.4", false}, {`, "pin_memory": true`, "0.19.4", true},
		{`, "pin_memory": false`, "0.19.6", false},
		{`, "pin_memory": false`, "0.18.2", true}, {`, "pin_memory": false`, "0.18.3", false}, {"", "0.14.0", false},
		{`, "pin_memory": false`, "0.10.0", true}, {`, "pin_memory": false`, "0.10.1", false},
	} {
		s := simulated(deepSpeedJob(t, m, zero(2, fmt.Sprintf(offload, test.key)), test.release))
		if got := ends(t, s.host, ledger.Step, ledger.Steady)[ledger.PinnedRounding] > 0; got != test.rounded {
			t.Errorf("%q in %s: rounding %v, want %v", test.key, test.release, got, test.rounded)
		}
	}
}

// TestDeepSpeedDeviceBytes compares the GPU's bytes with closed forms.
func TestDeepSpeedDeviceBytes(t *testing.T) {
	m := catalog(t, "llama-3.2-1b")
	n := m.Elements()
	const ranks, fused = 8, `, "optimizer": {"type": "AdamW", "params": {}}`
	const bucket, large = 2 * 5e8, int64(2 * 128256 * 2048)
	step := func(config string) map[ledger.Component]int64 {
		s := simulated(onRanks(ranks, deepSpeedJob(t, m, config[:len(config)-1]+fused+"}", "0.19.6")))
		return ends(t, s.gpu, ledger.Step, ledger.Steady)
	}
	for _, test := range []struct {
		name, config string
		want         int64
	}{
		{"ZeRO-0", zero(0, ""), 14 * n},
		{"ZeRO-1", zero(1, ""), 2*n + 12*n/ranks},
		{"ZeRO-2", zero(2, ""), 2*n + 12*n/ranks},
		{"ZeRO-2 offloaded", zero(2, `, "offload_optimizer": {"device": "cpu"}`), 2*n + large},
		{"ZeRO-3", zero(3, `, "stage3_param_persistence_threshold": 0`), 16*n/ranks + bucket},
		{"ZeRO-3 offloaded",
			zero(3, `, "offload_optimizer": {"device": "cpu"}, "stage3_param_persistence_threshold": 0`),
			2*n/ranks + bucket},
		{"ZeRO-3, all offloaded",
			zero(3, `, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}, `+
				`"stage3_param_persistence_threshold": 0`),
			bucket},
		{"ZeRO-1 with fp32 gradients",
			`{"train_batch_size": 16, "bf16": {"enabled": true}, "zero_optimization": {"stage": 1}, "data_types": ` +
				`{"grad_accum_dtype": "fp32"}}`,
			2*n + 4*n + 12*n/ranks}, // the step frees the 16-bit gradients (zero_grad)
	} {
		if got := total(step(test.config), ledger.MatmulWorkspaces); got != test.want {
			t.Errorf("%s: %d bytes, want %d", test.name, got, test.want)
		}
	}
}

// TestTwinFlow keeps a share of the sub-groups on the GPU. TestNVMe has buffers
// for the largest sub-group.
func TestTwinFlow(t *testing.T) {
	m := catalog(t, "llama-3-8b")
	s := simulated(deepSpeedJob(t, m,
		zero(3, `, "sub_group_size": 1e8, "offload_optimizer": {"device": "cpu", "pin_memory": false, "ratio": 0.25}`),
		"0.19.6"))
	d := s.engine.(*zero3)
	var onHost int64
	for _, g := range d.subGroups {
		if !g.onGPU {
			onHost += g.flat.Elements
		}
	}
	n := m.Elements()
	if share := float64(onHost) / float64(n); math.Abs(share-0.25) > 0.05 {
		t.Errorf("%.2f of the parameters on the host", share)
	}
	host, device := ends(t, s.host, ledger.Step, ledger.Steady), ends(t, s.gpu, ledger.Step, ledger.Steady)
	if host[ledger.MasterWeights] != 4*onHost || host[ledger.OptimizerStates] != 8*onHost ||
		device[ledger.MasterWeights] != 4*(n-onHost) || device[ledger.OptimizerStates] != 8*(n-onHost) {
		t.Errorf("%d of %d on the host: %v, %v", onHost, n, host, device)
	}
}

func TestNVMe(t *testing.T) {
	s := simulated(deepSpeedJob(t, catalog(t, "llama-3-8b"),
		zero(3, `, "offload_optimizer": {"device": "nvme", "nvme_path": "/n"}, "offload_param": {"device": "nvme", `+
			`"nvme_path": "/n", "pin_memory": false}`),
		"0.19.6"))
	largest := int64(0)
	for _, g := range s.engine.(*zero3).subGroups {
		largest = max(largest, g.flat.Elements)
	}
	held := ends(t, s.host, ledger.Step, ledger.Steady)
	if want := 4*largest*4 + 5*1e8*2; held[ledger.SwapBuffers] != want || largest < 1e9 ||
		held[ledger.MasterWeights]+held[ledger.OptimizerStates] != 0 || held[ledger.Parameters] != 2*1e9 {
		t.Errorf("buffers %d, want %d: %v", held[ledger.SwapBuffers], want, held)
	}
}

// peak returns the most that a trace holds in a phase.
func peak(t testing.TB, tr *trace, name ledger.PhaseName, iteration ledger.Iteration) int64 {
	t.Helper()
	for _, p := range tr.phases() {
		if p.Name == name && p.Iteration == iteration {
			return int64(p.PeakRequested)
		}
	}
	t.Fatalf("no phase %s %s", name, iteration)
	return 0
}

// componentAt returns the bytes of a component at the peak of a phase.
func componentAt(tr *trace, name ledger.PhaseName, component ledger.Component) int64 {
	for _, p := range tr.phases() {
		for _, c := range p.Components {
			if p.Name == name && c.Component == component {
				return int64(c.Bytes)
			}
		}
	}
	return 0
}

// TestDeepSpeedTransients tests temporaries: copies on the way to the GPU,
// buckets, and copies while parameters are flattened.
func TestDeepSpeedTransients(t *testing.T) {
	m := catalog(t, "llama-3.2-1b")
	n := m.Elements()
	const offload = `, "offload_optimizer": {"device": "cpu", "pin_memory": false}`
	run := func(config, release string) *simulation { return simulated(deepSpeedJob(t, m, config, release)) }
	over := func(s *simulation, tr *trace) int64 {
		return peak(t, tr, ledger.Step, ledger.Steady) - total(ends(t, tr, ledger.Step, ledger.Steady))
	}
	for _, test := range []struct {
		release      string
		device, host int64 // bytes per parameter in the step
	}{{"0.14.0", 0, 2}, {"0.14.1", 4, 0}, {"0.16.9", 4, 0}, {"0.17.0", 0, 0}} {
		s := run(zero(2, offload), test.release)
		if d, h := over(s, s.gpu), over(s, s.host); d != test.device*n || h != test.host*n {
			t.Errorf("%s: the step takes %d beside on the GPU and %d on the host", test.release, d, h)
		}
	}
	if s := run(zero(2, offload), "0.18.6"); peak(t, s.host, ledger.Initialize, ledger.Once) < 4*n ||
		peak(t, s.gpu, ledger.Initialize, ledger.Once) > 2*n+2*n {
		t.Errorf("put together on the host: %d there, %d on the GPU",
			peak(t, s.host, ledger.Initialize, ledger.Once), peak(t, s.gpu, ledger.Initialize, ledger.Once))
	}
	if s := run(zero(2, ""), "0.19.6"); peak(t, s.gpu, ledger.Initialize, ledger.Once) < 4*n ||
		peak(t, s.host, ledger.Initialize, ledger.Once) != 0 {
		t.Errorf("put together on the GPU: %d there, %d on the host",
			peak(t, s.gpu, ledger.Initialize, ledger.Once), peak(t, s.host, ledger.Initialize, ledger.Once))
	}
	small := deepSpeedJob(t, m, zero(2, ""), "0.19.6")
	small.GPU.Memory = ledger.Bytes(3 * n)
	if s := simulated(small); peak(t, s.host, ledger.Initialize, ledger.Once) != 4*n {
		t.Errorf("put together on the host for want of memory: %d bytes",
			peak(t, s.host, ledger.Initialize, ledger.Once))
	}
	// Gradients of 2 B, their fp32 copies, and these copies as one tensor.
	if s := run(`{"train_batch_size": 1, "bf16": {"enabled": true}, "optimizer": {"type": "AdamW", "params": {}}}`,
		"0.19.6"); over(s, s.gpu) != 10*n {
		t.Errorf("the step without ZeRO takes %d beside", over(s, s.gpu))
	}
	one, two := run(zero(2, `, "overlap_comm": false`), "0.19.6"), run(zero(2, `, "overlap_comm": true`), "0.19.6")
	if got := peak(t, two.gpu, ledger.Backward, ledger.Steady) - peak(t, one.gpu, ledger.Backward,
		ledger.Steady); got != 2*5e8 {
		t.Errorf("the second bucket takes %d bytes", got)
	}
}

// TestDeepSpeedReduction runs ZeRO-2 on two ranks through the gradients of three
// parameters of a million elements. A bucket holds two of them, and the second
// parameter is in both partitions.
func TestDeepSpeedReduction(t *testing.T) {
	const million = int64(1e6)
	for _, test := range []struct {
		name, release string
		offload       bool
		// the third gradient's peak, and the bytes that remain after it; the same for
		// the end of the pass
		third, left, last, end int64
	}{
		{"on the GPU", "0.19.6", false, 4 * million, 4 * million, 0, 4 * million},
		{"on the host", "0.19.5", true, 11 * million, 0, 11 * million, 0},
		{"on the host, the check without copies", "0.19.6", true, 4 * million, 0, 8 * million, 0},
		{"on the host, as before", "0.12.6", true, 4 * million, 0, 8 * million, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			j := onRanks(2, deepSpeedJob(t, linears([]int64{1000, 1000}, []int64{1000, 1000}, []int64{1000, 1000}),
				zero(2, `, "reduce_bucket_size": 2e6, "overlap_comm": false`), test.release))
			if test.offload {
				j.DeepSpeed.OffloadOptimizer.Device = "cpu"
			}
			s := newSimulation(j, newTrace(nil), newTrace(nil))
			s.micros = 1
			s.phase(ledger.Load, ledger.Once, s.engine.load)
			s.phase(ledger.Initialize, ledger.Once, s.engine.initialize)
			base := int64(s.gpu.live)
			during := func(what string, body func(), most, after int64) {
				s.phase(ledger.PhaseName(what), ledger.Once, body)
				if got := peak(t, s.gpu, ledger.PhaseName(what), ledger.Once) - base; got != most {
					t.Errorf("%s: at most %d bytes, want %d", what, got, most)
				}
				if got := int64(s.gpu.live) - base; got != after {
					t.Errorf("%s: %d bytes in the end, want %d", what, got, after)
				}
			}
			const bucket = 2 * 2 * million
			during("third parameter", func() { s.engine.gradient(s.trained[2]) }, bucket, bucket)
			during("second parameter", func() { s.engine.gradient(s.trained[1]) }, bucket, bucket)
			during("first parameter", func() { s.engine.gradient(s.trained[0]) }, bucket+test.third, bucket+test.left)
			if copied := componentAt(s.gpu, "first parameter", ledger.BucketCopies); !test.offload && copied != bucket {
				t.Errorf("%d bytes put together by rank, want %d", copied, bucket)
			}
			during("end", func() { s.engine.endBackward(true) }, bucket+max(test.last, test.left), test.end)
			if !test.offload { // a second pass accumulates its gradients
				during("third again", func() { s.engine.gradient(s.trained[2]) }, bucket+test.left, bucket+test.left)
				during("end again", func() { s.engine.gradient(s.trained[0]); s.engine.endBackward(true) },
					bucket+2*test.left, test.end)
			}
		})
	}
}

// TestDeepSpeedFetching tests which parameters ZeRO-3 keeps and prefetches.
func TestDeepSpeedFetching(t *testing.T) {
	m := catalog(t, "llama-3.2-1b")
	n, words := m.Elements(), int64(128256*2048)
	gathered := func(sizes string) (first, steady int64) {
		j := onRanks(2, deepSpeedJob(t, m, zero(3, sizes), "0.19.6"))
		if !strings.Contains(sizes, "persistence") {
			j.DeepSpeed.Sizes.PersistentParameter = 0
		}
		s := simulated(j)
		return ends(t, s.gpu, ledger.Forward, ledger.First)[ledger.GatheredParameters], ends(t, s.gpu, ledger.Forward,
			ledger.Steady)[ledger.GatheredParameters]
	}
	for _, test := range []struct {
		name, sizes   string
		first, steady int64
	}{
		{"nothing", `, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0`, 0, 0},
		{"norms",
			`, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0, ` +
				`"stage3_param_persistence_threshold": 2048`,
			33 * 2 * 2048, 33 * 2 * 2048},
		// The backward pass begins with the output head.
		{"the next module", `, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 1`, 0, 2 * words},
		{"everything", `, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 1e12`, 0, 2 * n},
		// Only the last norm is prefetched, for the backward pass.
		{"prefetch", `, "stage3_prefetch_bucket_size": 1, "stage3_max_reuse_distance": 0`, 0, 2 * 2048},
		{"no more than may live",
			`, "stage3_prefetch_bucket_size": 1e12, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0`, 0,
			0},
	} {
		if first, steady := gathered(test.sizes); first != test.first || steady != test.steady {
			t.Errorf("%s: %d and %d bytes, want %d and %d", test.name, first, steady, test.first, test.steady)
		}
	}
	// Several parameters are gathered into one tensor and copied out of it.
	s := newSimulation(onRanks(2, deepSpeedJob(t, m, zero(3, ""), "0.19.6")), newTrace(nil), newTrace(nil))
	f := s.engine.(*zero3).coordinator
	s.phase(ledger.Forward, ledger.First, func() { f.fetch(s.parameters[1:4]) })
	if bytes := 2 * elementsOf(s.parameters[1:4]); peak(t, s.gpu, ledger.Forward, ledger.First) != 2*bytes ||
		int64(s.gpu.live) != bytes {
		t.Errorf("peak of %d and %d in the end, want %d",
			peak(t, s.gpu, ledger.Forward, ledger.First), s.gpu.live, bytes)
	}
}

// TestSecondaryPartitions compares with DeepSpeed 0.19.8 on four CPU ranks what each rank keeps of a small Llama with
// zero_hpz_partition_size 2: the elements of ds_secondary_tensor of all parameters after each phase. The second forward
// pass frees nothing within the default max_reuse_distance.
func TestSecondaryPartitions(t *testing.T) {
	config := filestest.InNewFolder(t)("config.json", `{"model_type": "llama", "vocab_size": 1001, "hidden_size": 64,
		"intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
		"tie_word_embeddings": false}`)
	m, err := model.Load(config)
	if err != nil {
		t.Fatal(err)
	}
	const section = `, "zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 100`
	for _, init := range []bool{false, true} {
		j := onRanks(4, deepSpeedJob(t, m, zero(3, section), "0.19.8"))
		j.ZeROInit = init
		s := simulated(j)
		for _, want := range []struct {
			phase     ledger.PhaseName
			iteration ledger.Iteration
			elements  int64
		}{
			{ledger.Initialize, ledger.Once, 114400}, {ledger.Forward, ledger.First, 114400},
			{ledger.Backward, ledger.First, 114400}, {ledger.Step, ledger.First, 0},
			{ledger.Forward, ledger.Steady, 0}, {ledger.Backward, ledger.Steady, 114240},
			{ledger.Step, ledger.Steady, 0},
		} {
			if got := ends(t, s.gpu, want.phase, want.iteration)[ledger.SecondaryParameters]; got != 2*want.elements {
				t.Errorf("zero.Init %v, %s %s: %d bytes, want %d", init, want.iteration, want.phase, got,
					2*want.elements)
			}
		}
	}
}

// TestDeepSpeedProperties runs random configurations and models. The components
// sum up to the total, no temporaries remain, and every component has one reason.
func TestDeepSpeedProperties(t *testing.T) {
	directory := t.TempDir()
	rapid.Check(t, func(r *rapid.T) {
		config := fmt.Sprintf(`{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": %d, `+
			`"intermediate_size": %d, `+
			`"num_hidden_layers": %d, "num_attention_heads": 4,
			"vocab_size": %d, "tie_word_embeddings": %v}`,
			64*rapid.IntRange(1, 8).Draw(r, "width"), rapid.IntRange(1, 999).Draw(r, "inner"),
			rapid.IntRange(1, 5).Draw(r, "layers"),
			rapid.IntRange(2, 5000).Draw(r, "words"), rapid.Bool().Draw(r, "tied"))
		file := filepath.Join(directory, "config.json")
		if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
			r.Fatal(err)
		}
		m, err := model.Load(file)
		if err != nil {
			r.Fatal(err)
		}
		stage := rapid.IntRange(0, 3).Draw(r, "stage")
		j := deepSpeedJob(t, m, zero(stage, ""),
			rapid.SampledFrom([]string{
				"0.3.1", "0.9.0", "0.14.1", "0.16.9", "0.17.0", "0.18.3", "0.18.7", "0.19.4", "0.19.6",
			}).Draw(r, "release"))
		onRanks(rapid.IntRange(1, 9).Draw(r, "ranks"), j)
		j.Accumulation = rapid.IntRange(1, 3).Draw(r, "accumulation")
		j.ParameterType = rapid.SampledFrom([]dtype.Type{dtype.F16, dtype.BF16, dtype.F32}).Draw(r, "weights")
		j.SplitsDecay, j.ZeROInit = rapid.Bool().Draw(r, "splits"), rapid.Bool().Draw(r, "init")
		if rapid.Bool().Draw(r, "adapter") {
			if j.Adapter, err = peft.Parse("adapter_config.json",
				[]byte(`{"peft_type": "LORA", "r": 3, "target_modules": ["q_proj", "down_proj"]}`)); err != nil {
				r.Fatal(err)
			}
			j.AdapterType = dtype.F32
		}
		if rapid.Bool().Draw(r, "recompute") {
			j.Recompute = &autograd.Checkpoint{Reentrant: rapid.Bool().Draw(r, "reentrant")}
		}
		d := j.DeepSpeed
		d.OverlapReduction = rapid.Bool().Draw(r, "overlap")
		d.LowPrecisionMaster = rapid.Bool().Draw(r, "low")
		d.GradientAccumulationDType = rapid.SampledFrom([]dtype.Type{dtype.Invalid, dtype.F32}).Draw(r, "wide")
		size := rapid.Int64Range(0, 1_000_000)
		d.Sizes = deepspeed.Sizes{ReduceBucket: 1 + size.Draw(r, "bucket"), SubGroup: 1 + size.Draw(r, "sub-group"),
			PrefetchBucket:      size.Draw(r, "prefetch"),
			PersistentParameter: size.Draw(r, "persistent"), PersistentModel: size.Draw(r, "persistent model"),
			LiveParameters: size.Draw(r, "live"), ReuseDistance: size.Draw(r, "reuse"),
			SecondaryPartition: rapid.SampledFrom([]int64{0, 1, int64(j.World)}).Draw(r, "secondary")}
		if stage > 0 {
			d.OffloadOptimizer.Device = rapid.SampledFrom([]string{"none", "cpu"}).Draw(r, "optimizer")
			d.OffloadOptimizer.PinGiven = rapid.Bool().Draw(r, "pinned")
			if rapid.Bool().Draw(r, "zenflow") {
				d.ZenFlow = &deepspeed.ZenFlow{TopKRatio: 0.1, OverlapStep: rapid.Bool().Draw(r, "overlap step"),
					Offload: rapid.Bool().Draw(r, "offload")}
			}
		}
		if stage == 3 {
			device := rapid.SampledFrom([]string{"none", "cpu", "nvme"})
			d.OffloadParameters.Device = device.Draw(r, "parameters")
			d.OffloadParameters.HeldElements = size.Draw(r, "held")
			d.OffloadOptimizer.Device = device.Draw(r, "optimizer of stage 3")
			d.OffloadOptimizer.Ratio = rapid.Float64Range(0, 1).Draw(r, "ratio")
			d.OffloadOptimizer.SuperOffload = d.ZenFlow == nil && rapid.Bool().Draw(r, "super")
			d.GatherOnSave = rapid.Bool().Draw(r, "gather")
		}
		s := simulated(j)
		checkReasons(r, s)
		for _, tr := range []*trace{s.gpu, s.host} {
			for _, p := range tr.phases() {
				for _, list := range []struct {
					sum        ledger.Bytes
					components []ledger.Holding
				}{{p.PeakRequested, p.Components}, {p.EndRequested, p.End}} {
					var sum ledger.Bytes
					for _, c := range list.components {
						sum += c.Bytes
					}
					if sum != list.sum {
						r.Fatalf("%s %s: components of %d, in all %d: %v",
							p.Name, p.Iteration, sum, list.sum, list.components)
					}
				}
			}
			first, steady, saved := ends(t, tr, ledger.Step, ledger.First), ends(t, tr, ledger.Step,
				ledger.Steady), ends(t, tr, ledger.Checkpoint, ledger.Once)
			if fmt.Sprint(first) != fmt.Sprint(steady) || fmt.Sprint(steady) != fmt.Sprint(saved) {
				r.Fatalf("the first step leaves %v, the second %v, and saving %v", first, steady, saved)
			}
			for _, passing := range []ledger.Component{ledger.BucketCopies, ledger.ReductionTemporaries,
				ledger.DtypeConversions, ledger.PinningCopies, ledger.FlatteningCopies, ledger.OptimizerTemporaries,
				ledger.FullStateDict, ledger.ActivationGradients, ledger.ResidualActivations} {
				if steady[passing] != 0 {
					r.Fatalf("%s: %d bytes are left", passing, steady[passing])
				}
			}
		}
	})
}

// TestLamb holds DeepSpeed's Lamb in fp16 against step_fused_lamb: no gradient is cast, but all are put together twice,
// and cast to fp32 for the norm.
func TestLamb(t *testing.T) {
	const n = 1 << 22 // parameters
	j := deepSpeedJob(t, linears([]int64{2048, 2048}),
		`{"train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": true}, "optimizer": {"type": "Lamb"}}`, "0.19.5")
	j.Optimizer = job.NewOptimizer("lamb", job.Foreach)
	s := stepped(j)
	held := ends(t, s.gpu, ledger.Step, ledger.First)
	if held[ledger.MasterWeights] != 4*n || held[ledger.OptimizerStates] != 8*n {
		t.Errorf("held: %v", held)
	}
	for _, p := range s.gpu.phases() {
		if want := int64(2+4+8+2+2+4) * n; p.Name == ledger.Step && int64(p.PeakRequested) != want {
			// weights, masters, states, two flat tensors, and one in fp32; this test has no backward pass
			t.Errorf("a peak of %d, want %d", p.PeakRequested, want)
		}
	}
}

// TestBF16OptimizerReduces: BF16_Optimizer copies accumulated gradients in the type of the all-reduce, and releases
// differ in whether a backward pass frees the gradients of the one before (clear_lp_grads).
func TestBF16OptimizerReduces(t *testing.T) {
	const config = `{"train_batch_size": 8, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"%s},
		"zero_optimization": {"stage": 1}%s}`
	m := linears([]int64{1024, 1024}, []int64{1024, 1024}, []int64{1024, 1024}, []int64{1024, 1024})
	const elements = 4 << 20
	for more, want := range map[string]ledger.Bytes{"": 2 * elements, `, "communication_data_type": "fp32"`: 0} {
		s := stepped(onRanks(4, deepSpeedJob(t, m, fmt.Sprintf(config, "", more), "0.19.8")))
		for _, p := range s.gpu.phases() {
			if p.Name == ledger.Backward && p.PeakRequested-p.EndRequested < want {
				t.Errorf("%s: the backward pass has %d B beside what stays, expected %d for the all-reduce", more,
					p.PeakRequested-p.EndRequested, want)
			}
		}
	}
	for release, zeroes := range map[string]bool{"0.12.5": false, "0.12.6": true, "0.14.2": false, "0.16.4": false,
		"0.16.5": true} {
		s := newSimulation(onRanks(4, deepSpeedJob(t, m, fmt.Sprintf(config, "", ""), release)), newTrace(nil),
			newTrace(nil))
		if e := s.engine.(*bf16Optimizer); e.zeroes() != zeroes {
			t.Errorf("DeepSpeed %s zeroes gradients: %v, expected %v", release, e.zeroes(), zeroes)
		}
	}
}
