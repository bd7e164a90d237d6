//go:build linux

package ghost

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/torchtest"
	"plimsoll/internal/input/gpu"
	"plimsoll/internal/plan/plan"
)

// whole skips a test in the short suite: make test-ghost runs it where a change needs it.
func whole(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("make test-ghost runs it")
	}
}

// request is one that runs a program of testdata.
func request(t *testing.T, words ...string) Request {
	t.Helper()
	if compilerOf() == "" && os.Getenv(LibraryVariable) == "" {
		if os.Getenv("CI") == "true" {
			t.Fatal("there is no C compiler")
		}
		t.Skip("there is no C compiler")
	}
	python := torchtest.Python(t)
	words[0] = filepath.Join("testdata", words[0])
	return Request{Command: append([]string{python}, words...), GPUs: 1, Nodes: 1, Steps: 2, Patience: 2 * time.Minute,
		Output: &bytes.Buffer{}}
}

func run(t *testing.T, r Request) *Record {
	t.Helper()
	record, err := r.Run(t.Context())
	if err != nil {
		t.Fatalf("%v\n%s", err, r.Output)
	}
	return record
}

// TestProgramPlansItself runs four matrices of 4 MiB under AdamW: all that they hold is known.
func TestProgramPlansItself(t *testing.T) {
	r := request(t, "linear.py")
	r.GPU = gpu.Model{Name: "A100-80GB", Memory: 80 * ledger.GiB, Capability: 80}
	record := run(t, r)
	const matrices = 16 * ledger.MiB
	held := map[ledger.PhaseName]map[ledger.Component]ledger.Bytes{}
	for _, p := range record.GPU.Phases {
		held[p.Name] = map[ledger.Component]ledger.Bytes{}
		for _, h := range p.Components {
			held[p.Name][h.Component] += h.Bytes
		}
	}
	for _, c := range []struct {
		phase     ledger.PhaseName
		component ledger.Component
		bytes     ledger.Bytes
	}{
		{ledger.Load, ledger.Parameters, matrices},
		{ledger.Forward, ledger.Parameters, matrices},
		{ledger.Step, ledger.Parameters, matrices},
		{ledger.Step, ledger.Gradients, matrices},
		{ledger.Step, ledger.OptimizerStates, 2 * matrices},
	} {
		if got := held[c.phase][c.component]; got != c.bytes {
			t.Errorf("%s: %s hold %v, want %v", c.phase, c.component, got, c.bytes)
		}
	}
	checkPhases(t, record)
	if last := record.GPU.Phases[len(record.GPU.Phases)-1]; last.EndRequested < 3*matrices {
		t.Errorf("the last step ends with %v", last.EndRequested)
	}
	if record.Steps != 2 || record.End.Kind != "enough" || record.Ranks != 1 || len(record.Unmodelled) > 0 {
		t.Errorf("%+v", record)
	}
	if peak := record.GPU.Peak(); peak.PeakReserved < 4*matrices || peak.PeakReserved > 8*matrices ||
		peak.PeakUsed != peak.PeakReserved+record.GPU.Outside[0].Bytes {
		t.Errorf("the peak is %+v", peak)
	}
}

// TestReentrantCheckpoints has one backward pass in a step, whatever goes backward within it.
func TestReentrantCheckpoints(t *testing.T) {
	whole(t)
	checkPhases(t, run(t, request(t, "reentrant.py")))
}

// TestTurns has the phases of two optimizers that step in turn, after micro batches: the first steps are those until
// each has stepped once. What the optimizers hold is known exactly.
func TestTurns(t *testing.T) {
	whole(t)
	record := run(t, request(t, "turns.py"))
	checkPhases(t, record)
	const matrix = 4 * ledger.MiB
	steady := record.GPU.Phases[len(record.GPU.Phases)-1]
	held := map[ledger.Component]ledger.Bytes{}
	for _, h := range steady.Components {
		held[h.Component] += h.Bytes
	}
	if held[ledger.Parameters] != 2*matrix || held[ledger.OptimizerStates] != 2*matrix ||
		held[ledger.Gradients] < matrix {
		t.Errorf("the last step holds %v", held)
	}
}

// TestRecurrent asks cuDNN, cuSPARSE and cuSOLVER for sizes. What cuDNN keeps of a recurrent network is an estimate.
func TestRecurrent(t *testing.T) {
	whole(t)
	record := run(t, request(t, "recurrent.py"))
	checkPhases(t, record)
	peak := record.GPU.Peak()
	if peak.PeakReserved > 400*ledger.MiB || peak.PeakReserved < 80*ledger.MiB {
		t.Errorf("the peak is %v", peak.PeakReserved)
	}
	estimates := slices.ContainsFunc(record.Notes, func(n Note) bool { return n.Kind == "estimates" })
	if !estimates {
		t.Errorf("no estimate is noted: %v", record.Notes)
	}
}

// TestOwnStep plans a program that has no optimizer of torch.
func TestOwnStep(t *testing.T) {
	whole(t)
	record := run(t, request(t, "own_step.py"))
	checkPhases(t, record)
	kinds := map[string]int{}
	for _, n := range record.Notes {
		kinds[n.Kind]++
	}
	if record.Steps != 2 || kinds["steps"] != 1 || kinds["weights"] != 1 {
		t.Errorf("%d steps, noted %v", record.Steps, record.Notes)
	}
}

// TestStatesBeforeSteps does not take a step before the first pass for one of the training.
func TestStatesBeforeSteps(t *testing.T) {
	whole(t)
	record := run(t, request(t, "early_states.py"))
	checkPhases(t, record)
	if record.Steps != 2 {
		t.Errorf("%d steps", record.Steps)
	}
}

// TestAccumulation has one forward and one backward pass in a step, whatever the number of its batches and parts.
func TestAccumulation(t *testing.T) {
	whole(t)
	checkPhases(t, run(t, request(t, "accumulates.py")))
}

// checkPhases compares the phases with those of two steps.
func checkPhases(t *testing.T, record *Record) {
	t.Helper()
	var names []string
	for _, p := range record.GPU.Phases {
		names = append(names, strings.TrimSpace(string(p.Name)+" "+string(p.Iteration)))
	}
	want := "load, forward first, backward first, step first, forward steady, backward steady, step steady"
	if got := strings.Join(names, ", "); got != want {
		t.Errorf("the phases are %s, want %s", got, want)
	}
}

// TestValues runs a program that checks what integers, sizes by value, streams, graphs and pinned memory are like.
func TestValues(t *testing.T) {
	r := request(t, "values.py")
	r.GPUs, r.GPU = 3, gpu.Model{Name: "A100-80GB", Memory: 8 * ledger.GiB, Capability: 80}
	record := run(t, r)
	if record.End.Kind != "enough" {
		t.Fatalf("the program %s at %s: %s", record.End.Kind, record.End.Place, record.End.Message)
	}
	var pinned ledger.Bytes
	for _, held := range record.Phases[0].Host.Held {
		pinned += held.Pinned
	}
	if pinned < 3*ledger.MiB || record.ResidentPeak > 4*ledger.GiB || *record.Device != 2 {
		t.Errorf("%v are pinned and %v resident, on device %d", pinned, record.ResidentPeak, *record.Device)
	}
	for _, kind := range []string{"guesses"} {
		found := false
		for _, n := range record.Notes {
			found = found || n.Kind == kind
		}
		if !found {
			t.Errorf("no note of %s: %v", kind, record.Notes)
		}
	}
}

// TestProperties runs a program on an RTX 4090, which says of itself what NVIDIA says of it.
func TestProperties(t *testing.T) {
	r := request(t, "properties.py")
	r.GPU = gpu.Model{Name: "RTX-4090", Memory: 24 * ledger.GiB, Capability: 89}
	if record := run(t, r); record.End.Kind != "enough" {
		t.Errorf("the program %s at %s: %s", record.End.Kind, record.End.Place, record.End.Message)
	}
}

// TestHost holds memory of the host that is read, pageable, pinned, registered and of a child.
func TestHost(t *testing.T) {
	whole(t)
	record := run(t, request(t, "host.py"))
	load, step := record.Host[0], record.Host[len(record.Host)-1]
	if load.name != ledger.Load || step.name != ledger.Step {
		t.Fatalf("the phases begin with %s and end with %s", load.name, step.name)
	}
	// 512 MiB passed, and then 83 MiB stayed.
	if got := load.bytes() - step.bytes(); got < 400*ledger.MiB || got > 512*ledger.MiB {
		t.Errorf("the load took %v more than the step", got)
	}
	held := map[ledger.Component]ledger.Holding{}
	for _, h := range step.holdings {
		held[h.Component] = h
	}
	bare := run(t, request(t, "linear.py")).Host[0].holdings[0].Bytes
	for _, c := range []struct {
		component   ledger.Component
		least, most ledger.Bytes
		says        string
	}{
		{ledger.Parameters, 64 * ledger.MiB, 64 * ledger.MiB, "testdata/host.py:25 <module> (64.0 MiB)"},
		{ledger.Unattributed, 20 * ledger.MiB, 20 * ledger.MiB, "(16.0 MiB); 20.0 MiB are pinned"},
		{ledger.ChildProcesses, 40 * ledger.MiB, 200 * ledger.MiB, "that the program started"},
		{ledger.PythonProcess, bare + 195*ledger.MiB, bare + 260*ledger.MiB, "CUDA's libraries"},
	} {
		if h := held[c.component]; h.Bytes < c.least || h.Bytes > c.most || !strings.Contains(h.Why, c.says) {
			t.Errorf("%s: %v (%s), want %v to %v and %q", c.component, h.Bytes, h.Why, c.least, c.most, c.says)
		}
	}
}

// TestOutside takes memory without PyTorch's allocator: of the GPU, which is in use in the phases that hold it, and
// managed memory, which is counted on the host, also where it is more than the GPU has.
func TestOutside(t *testing.T) {
	whole(t)
	r := request(t, "outside.py")
	r.GPU = gpu.Model{Name: "small", Memory: 2 * ledger.GiB, Capability: 80}
	record := run(t, r)
	checkPhases(t, record)
	for _, p := range record.GPU.Phases {
		want := 30 * ledger.MiB
		if p.Name == ledger.Load {
			want = 64 * ledger.MiB // 40 MiB passed
		}
		at := slices.IndexFunc(p.Components, func(h ledger.Holding) bool { return h.Component == ledger.OutsideTorch })
		if at < 0 || p.Components[at].Bytes != want || !strings.Contains(p.Components[at].Why, "outside.py:12 take") {
			t.Errorf("the %s %s has %v, want %v outside of torch", p.Iteration, p.Name, p.Components, want)
		}
		if got := p.PeakUsed - p.PeakReserved - record.GPU.Outside[0].Bytes; got != want {
			t.Errorf("%v more than reserved are in use in the %s, want %v", got, p.Name, want)
		}
	}
	held := map[ledger.Component]ledger.Holding{}
	for _, h := range record.Host[len(record.Host)-1].holdings {
		held[h.Component] = h
	}
	for component, want := range map[ledger.Component]ledger.Bytes{ledger.ManagedMemory: 4 * ledger.GiB,
		ledger.ManagedOptimizerStates: 64 * ledger.MiB} {
		if held[component].Bytes != want {
			t.Errorf("%s: %+v, want %v", component, held[component], want)
		}
	}
	if !slices.ContainsFunc(record.Notes, func(n Note) bool { return n.Kind == "managed" }) {
		t.Errorf("no note of managed memory: %v", record.Notes)
	}
}

// TestNames has lines ask for memory of the host whose files have names with tabs, line breaks and bytes that are no
// text, and whose stacks are longer than any that is kept.
func TestNames(t *testing.T) {
	whole(t)
	r := request(t, "names.py")
	record := run(t, r)
	checkPhases(t, record)
	var held ledger.Bytes
	for _, h := range record.Host[0].holdings {
		if h.Component != ledger.PythonProcess {
			held += h.Bytes
		}
		if !utf8.ValidString(h.Why) || strings.ContainsAny(h.Why, "\t\n") {
			t.Errorf("%s: %q", h.Component, h.Why)
		}
	}
	if held < 80*ledger.MiB {
		t.Errorf("%v are held, expected 80 MiB", held)
	}
	r.Command = append(r.Command, "fail")
	checkRefused(t, r, "ValueError", "of it")
}

// TestFolderThatIsNoText has a program in a folder whose name is not in UTF-8: PyTorch cannot say what it held.
func TestFolderThatIsNoText(t *testing.T) {
	whole(t)
	r := request(t, "linear.py")
	text, err := os.ReadFile(r.Command[1])
	if err != nil {
		t.Fatal(err)
	}
	folder := filepath.Join(t.TempDir(), "caf\xe9")
	r.Command[1] = filepath.Join(folder, "linear.py")
	if err := errors.Join(os.Mkdir(folder, 0o700), os.WriteFile(r.Command[1], text, 0o600)); err != nil {
		t.Skip(err) // a file system whose names are text
	}
	checkRefused(t, r, `caf\udce9`, "rename")
	whole := request(t, "linear.py")
	whole.Command = []string{r.Command[0], "-c",
		"exec(compile(" + strconv.Quote(string(text)) + ", '\\udce9.py', 'exec'))"}
	checkRefused(t, whole, "what it held cannot be recorded: RuntimeError")
}

// TestLaunchesOfNobody has launchers that would start no rank, or more than a node has.
func TestLaunchesOfNobody(t *testing.T) {
	whole(t)
	for arguments, says := range map[string]string{"--nproc_per_node 0": "expected 1 to 1024 ranks",
		"--nproc_per_node 99999": "expected 1 to 1024 ranks", "--nproc_per_node many": "expected numbers",
		"--nnodes 0": "expected 1 to 1024 ranks", "--nnodes 1:few": "expected numbers"} {
		r := request(t, "linear.py")
		words := append([]string{"-m", "torch.distributed.run"}, strings.Fields(arguments)...)
		r.Command = slices.Insert(r.Command, 1, words...)
		checkRefused(t, r, says)
	}
}

// TestHostsOfDeepSpeed counts the ranks of DeepSpeed's launcher, on nodes of 4 GPUs where nothing else is said.
func TestHostsOfDeepSpeed(t *testing.T) {
	whole(t)
	folder := t.TempDir()
	for name, text := range map[string]string{"hosts": "a slots=4\nb slots=4\n# no more\nc slots=4\n",
		"uneven": "a slots=8\nb slots=4\n"} {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var said bytes.Buffer
	r := request(t, "hosts.py", folder)
	r.Output = &said
	_, _ = r.Run(t.Context()) // which is no training
	for _, want := range []string{"<> (4, 1)", "<--num_gpus 2> (2, 1)", "<--num_nodes 2 --num_gpus 4> (4, 2)",
		"<--include localhost:4,5,6> (3, 1)", "<--exclude localhost:0> (3, 1)", "<--hostfile hosts> (4, 3)",
		"<--hostfile hosts --num_nodes 2> (4, 2)", "<--hostfile hosts --include a:0,1@b:2,3> (2, 2)",
		"<--hostfile hosts --exclude c> (4, 2)", "<--hostfile hosts --exclude c:0> refused: a has 4 ranks, c has 3",
		"<--hostfile uneven> refused: a has 8 ranks, b has 4", "<--hostfile uneven --num_gpus 4> (4, 2)",
		"<--hostfile hosts --include d> refused: Hostname 'd' not found in hostfile",
		"<--hostfile hostsx> refused: the hostfile", "<--hostfile hostsx --num_nodes 4 --num_gpus 8> (8, 4)",
		"<--num_gpus 2 --include localhost:0> refused: Cannot specify num_nodes/gpus with include/exclude",
		"<--autotuning run> refused: --autotuning"} {
		if !strings.Contains(said.String(), want) {
			t.Errorf("expected %q in\n%s", want, said.String())
		}
	}
}

// TestPythonWithoutAProgram has nothing to run.
func TestPythonWithoutAProgram(t *testing.T) {
	for _, arguments := range []string{"", "-c", "-m", "-W ignore", "-X dev -m"} {
		r := request(t, "linear.py")
		r.Command = append(r.Command[:1], strings.Fields(arguments)...)
		checkRefused(t, r, "python without a program")
	}
}

// TestHintNamesTheProgram has a launcher's script fail: no line of it is named as one of the program.
func TestHintNamesTheProgram(t *testing.T) {
	whole(t)
	r := request(t, "linear.py")
	launcher := filepath.Join(filepath.Dir(r.Command[0]), "accelerate")
	if _, err := os.Stat(launcher); err != nil {
		t.Skip(err)
	}
	r.Command = []string{launcher, "launch", "--config_file", "nowhere.yaml", r.Command[1]}
	_, err := r.Run(t.Context())
	var input *fault.Input
	if !errors.As(err, &input) || !strings.Contains(err.Error(), "nowhere.yaml") || input.Hint != "" {
		t.Errorf("%v: expected that the file is missing, without a hint", err)
	}
}

// checkRefused runs a program that has no plan.
func checkRefused(t *testing.T, r Request, says ...string) {
	t.Helper()
	_, err := r.Run(t.Context())
	var input *fault.Input
	if !errors.As(err, &input) {
		t.Errorf("%v: expected bad input\n%s", err, r.Output)
		return
	}
	for _, part := range says {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%v: expected %q", err, part)
		}
	}
}

// TestNode adds the ranks of a node, which holds the first rank and others like the last.
func TestNode(t *testing.T) {
	rank := func(bytes, states ledger.Bytes) *Record {
		holdings := []ledger.Holding{{Component: ledger.PythonProcess, Bytes: 3 * ledger.GiB, Why: "Python"}}
		if bytes > 0 {
			holdings = append(holdings, ledger.Holding{Component: ledger.Parameters, Bytes: bytes, Why: "a line"})
		}
		if states > 0 {
			holdings = append(holdings, ledger.Holding{Component: ledger.OptimizerStates, Bytes: states, Why: "a line"})
		}
		return &Record{Ranks: 8, LocalRanks: 4, Host: []hostPhase{{ledger.Load, ledger.Once, holdings}}}
	}
	j := &Job{First: rank(7*ledger.GiB, 0), Last: rank(1*ledger.GiB, 2*ledger.GiB)}
	node := j.host(64 * ledger.GiB)
	if node.Count != 2 || node.Peak().PeakUsed != (4*3+7+3*1+3*2)*ledger.GiB || node.Capacity != 64*ledger.GiB {
		t.Errorf("the node is %+v", node)
	}
	if node.Interval.Lower >= node.Peak().PeakUsed || node.Interval.Upper > node.Peak().PeakUsed+4*ledger.GiB {
		t.Errorf("its interval is %+v", node.Interval)
	}
}

// TestStreams has memory that another stream uses be free late, and at once.
func TestStreams(t *testing.T) {
	whole(t)
	job, err := request(t, "late.py").Play(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	peak, interval := job.First.GPU.Peak(), job.First.GPU.Interval
	if peak.PeakReserved < 130*ledger.MiB || peak.PeakReserved > 240*ledger.MiB { // torch 2.8 keeps workspaces
		t.Errorf("%v are reserved", peak.PeakReserved)
	}
	// What was given back is not allocated, though its stream still uses it: one block of 64 MiB at a time is.
	var most ledger.Bytes
	for _, p := range job.First.GPU.Phases {
		most = max(most, p.PeakAllocated)
		if p.PeakAllocated < p.PeakRequested {
			t.Errorf("%v are allocated where %v are requested", p.PeakAllocated, p.PeakRequested)
		}
	}
	if most < 64*ledger.MiB || most >= 128*ledger.MiB {
		t.Errorf("%v are allocated", most)
	}
	if below := peak.PeakUsed - interval.Lower; below < 64*ledger.MiB || interval.Sources[0].Below == 0 {
		t.Errorf("the interval is %+v", interval)
	}
}

// canceling cancels a run once its program has said something.
type canceling context.CancelFunc

func (c canceling) Write(said []byte) (int, error) {
	c()
	return len(said), nil
}

// TestInterrupted ends a program that would not end, and leaves nothing.
func TestInterrupted(t *testing.T) {
	r := request(t, "linear.py")
	folder := t.TempDir()
	t.Setenv("TMPDIR", folder)
	ctx, cancel := context.WithCancel(t.Context())
	r.Output = canceling(cancel)
	r.Command = []string{r.Command[0], "-c", "print('begun', flush=True)\nwhile True: pass"}
	if _, err := r.Play(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("it ended with %v", err)
	}
	if left, err := os.ReadDir(folder); err != nil || len(left) > 0 {
		t.Errorf("%v is left: %v", left, err)
	}
}

// TestHostLimit ends a program that takes more than it may, and says where it did.
func TestHostLimit(t *testing.T) {
	r := request(t, "hungry.py", "600")
	r.HostLimit = 256 * ledger.MiB
	checkRefused(t, r, "more than the 256 MiB that it may take", "testdata/hungry.py:10")
}

// TestNothingStays ends processes that the program has put into sessions of their own, however the program ends.
func TestNothingStays(t *testing.T) {
	for _, way := range []string{"leaves", "stays"} {
		var said bytes.Buffer
		r := request(t, "hungry.py", "1", way)
		r.Output = &said
		ctx, cancel := context.WithCancel(t.Context())
		if way == "stays" {
			r.Output = io.MultiWriter(&said, canceling(cancel))
		}
		_, err := r.Run(ctx)
		if cancel(); err == nil {
			t.Fatal("it has a plan")
		}
		left := strings.Fields(said.String())
		if len(left) < 2 {
			t.Fatalf("%s: it printed %q", way, said.String())
		}
		for _, word := range left[:2] {
			pid, err := strconv.Atoi(word)
			if err != nil {
				t.Fatal(err)
			}
			if stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); err == nil &&
				!strings.Contains(string(stat), ") Z ") {
				t.Errorf("%s: process %d is left: %s", way, pid, stat)
			}
		}
	}
}

// TestVary finds the largest batch that fits. In the forward and the backward pass a vector takes less than 64 KiB.
func TestVary(t *testing.T) {
	whole(t)
	r := request(t, "linear.py", "{batch}")
	r.GPU = gpu.Model{Name: "small", Capability: 80}
	r.GPU.Memory = ledger.GiB + r.outside()
	v, err := ParseVariation("batch=512..2048")
	if err != nil {
		t.Fatal(err)
	}
	played, err := r.Vary(t.Context(), v, 0, nil)
	if err != nil {
		t.Fatal(err)
	}
	at := slices.IndexFunc(played, func(o Varied) bool { return o.Verdict != plan.Fits })
	if at < 1 || at == len(played) || played[at].number() > played[at-1].number()*101/100 {
		t.Fatalf("%d of %d fit", at, len(played))
	}
	t.Logf("%s of %d", played[at-1].Value, len(played))
	if fits := played[at-1].number(); fits < 768 || played[0].Value != "512" || played[len(played)-1].Value != "2048" {
		t.Errorf("%d vectors fit", fits)
	}
	if _, err := request(t, "linear.py").Vary(t.Context(), v, 0, nil); err == nil {
		t.Error("a command without {batch} was run")
	}
}

// TestReplayed replays the requests of a program under other settings. The replays reserve what the program does with
// them.
func TestReplayed(t *testing.T) {
	whole(t)
	const other = "expandable_segments:True"
	r := request(t, "linear.py", "3000")
	var kept bytes.Buffer
	r.WhatIf, r.Keep = []string{other}, func(from io.Reader) error { _, err := io.Copy(&kept, from); return err }
	record := run(t, r)
	t.Setenv("PYTORCH_CUDA_ALLOC_CONF", other)
	really := run(t, request(t, "linear.py", "3000"))
	if record.AsItWas.Reserved != record.GPU.Peak().PeakReserved || len(record.Replays) != 1 ||
		record.Replays[0].Reserved != really.GPU.Peak().PeakReserved {
		t.Errorf("replayed: %v and %v, reserved: %v and %v", record.AsItWas, record.Replays,
			record.GPU.Peak().PeakReserved, really.GPU.Peak().PeakReserved)
	}
	if kept.Len() == 0 {
		t.Error("no snapshot was kept")
	}
}

// TestRunsOut runs a program on a GPU that is too small: PyTorch's own error says so.
func TestRunsOut(t *testing.T) {
	r := request(t, "linear.py")
	r.GPU = gpu.Model{Name: "small", Memory: 500*ledger.MiB + r.outside(), Capability: 80}
	r.GPU.Memory = 40*ledger.MiB + r.outside()
	record := run(t, r)
	if record.End.Kind != "failed" || record.Failures == 0 || record.Retries == 0 ||
		!strings.Contains(record.End.Message, "CUDA out of memory. Tried to allocate") {
		t.Errorf("ended with %+v, after %d failures and %d retries", record.End, record.Failures, record.Retries)
	}
}

// TestRanks plays one of 16 ranks that torchrun would start. Nobody waits for the others.
func TestRanks(t *testing.T) {
	whole(t)
	r := request(t, "ranks.py")
	r.Command = append([]string{r.Command[0], "-m", "torch.distributed.run", "--nproc_per_node", "8", "--nnodes", "2",
		"--rdzv_endpoint", "192.0.2.1:29500"}, r.Command[1:]...)
	r.GPUs, r.Rank = 8, 3
	record := run(t, r)
	if record.Ranks != 16 || record.LocalRanks != 8 || *record.Device != 3 || len(record.GPU.Outside) != 2 {
		t.Errorf("%d ranks, on device %d, with %v", record.Ranks, *record.Device, record.GPU.Outside)
	}
	for _, p := range record.GPU.Phases {
		buckets := slices.IndexFunc(p.Components, func(h ledger.Holding) bool {
			return h.Component == ledger.CommunicationBuckets
		})
		// torch 2.8 has two buckets of 4 MiB.
		if p.Name == ledger.Step && (buckets < 0 || p.Components[buckets].Bytes%(4*ledger.MiB) != 0) {
			t.Errorf("the %s step holds %v", p.Iteration, p.Components)
		}
	}
	r.GPUs = 1 // as the launcher says
	job, err := r.Play(t.Context())
	if err != nil || job.Last == nil || job.Last.Rank != 15 || len(job.Notes) > len(job.First.Notes) {
		t.Errorf("%+v: %v", job, err)
	}
}

// TestSpawns plays the first and the last of the processes that a program starts itself.
func TestSpawns(t *testing.T) {
	whole(t)
	r := request(t, "spawns.py")
	r.GPUs = 4
	job, err := r.Play(t.Context())
	if err != nil {
		t.Fatalf("%v\n%s", err, r.Output)
	}
	checkPhases(t, job.First)
	if job.First.Ranks != 4 || job.Last == nil || job.Last.Rank != 3 || *job.Last.Device != 3 {
		t.Errorf("the first is %+v, the last %+v", job.First, job.Last)
	}
}

// TestStages plays a pipeline of three stages: the first and the last wait for the one between them, and it for both.
func TestStages(t *testing.T) {
	whole(t)
	r := request(t, "stages.py")
	r.Command = slices.Insert(r.Command, 1, "-m", "torch.distributed.run", "--nproc_per_node", "3")
	r.GPUs = 3
	job, err := r.Play(t.Context())
	if err != nil {
		t.Fatalf("%v\n%s", err, r.Output)
	}
	if job.Last == nil {
		t.Fatalf("the last stage was not played: %v", job.Notes)
	}
	held := func(record *Record) (bytes ledger.Bytes) {
		steady := record.GPU.Phases[len(record.GPU.Phases)-1]
		for _, h := range steady.Components {
			if h.Component == ledger.Parameters {
				bytes += h.Bytes
			}
		}
		return bytes
	}
	// Widths are 512, 1024, 1536 and 2048.
	if first, last := held(job.First), held(job.Last); first != 2*ledger.MiB || last != 12*ledger.MiB {
		t.Errorf("the first stage holds parameters of %v, the last of %v", first, last)
	}
}

// TestStarts records the program that a command starts, whether it trains or fails.
func TestStarts(t *testing.T) {
	whole(t)
	record := run(t, request(t, "starts.py", filepath.Join("testdata", "linear.py")))
	if record.Steps != 2 || record.End.Kind != "enough" {
		t.Errorf("%+v", record)
	}
	r := request(t, "starts.py", "testdata/nowhere.py")
	if _, err := r.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "nowhere.py: there is no such file") {
		t.Errorf("%v\n%s", err, r.Output)
	}
}

// TestWeightsThatAreNotHere makes a model of 4096 tokens and two layers of its configuration alone.
func TestWeightsThatAreNotHere(t *testing.T) {
	whole(t)
	folder := t.TempDir()
	const config = `{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16",
		"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
		"vocab_size": 4096, "tie_word_embeddings": true}`
	if err := os.WriteFile(filepath.Join(folder, "config.json"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	record := run(t, request(t, "pretrained.py", folder))
	if !slices.ContainsFunc(record.Notes, func(n Note) bool { return n.Kind == "weights" }) {
		t.Errorf("no note of weights: %v", record.Notes)
	}
	const parameters = 4096*256 + 2*(4*256*256+3*256*512+2*256) + 256
	for _, h := range record.GPU.Phases[0].Components {
		const frequencies = 32 * 4 // of the rotary embedding: once, or twice since transformers 5
		over := h.Bytes - 2*parameters
		if h.Component == ledger.Parameters && over != frequencies && over != 2*frequencies {
			t.Errorf("parameters hold %d bytes, want %d and buffers", h.Bytes, 2*parameters)
		}
	}
}

// TestDataThatAreNotHere makes up rows and a tokenizer if it is told to. Else it says that it can.
func TestDataThatAreNotHere(t *testing.T) {
	whole(t)
	folder := t.TempDir()
	const config = `{"model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
		"num_attention_heads": 2, "vocab_size": 4096, "bos_token_id": 1, "eos_token_id": 2}`
	if err := os.WriteFile(filepath.Join(folder, "config.json"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	r := request(t, "madeup.py", folder)
	_, err := r.Run(t.Context())
	var bad *fault.Input
	if !errors.As(err, &bad) || !strings.Contains(bad.Hint, "the data set nobody/texts is not here: --data synthetic") {
		t.Errorf("%v: expected a hint at --data synthetic\n%s", err, r.Output)
	}
	r.Data = &Data{Tokens: 64, Columns: []string{}}
	record := run(t, r)
	made := 0
	for _, n := range record.Notes {
		if n.Kind == "data" {
			made++
		}
	}
	if record.Steps != 2 || made != 3 {
		t.Errorf("%d steps, noted %v", record.Steps, record.Notes)
	}
}

// TestConvertedOnTheHost converts large weights there, and so makes none of their pages.
func TestConvertedOnTheHost(t *testing.T) {
	whole(t)
	record := run(t, request(t, "converted.py"))
	if record.ResidentPeak > 1536*ledger.MiB {
		t.Errorf("%v of the program were in memory", record.ResidentPeak)
	}
}

// TestTuned compiles each kernel once: no configuration is faster than another.
func TestTuned(t *testing.T) {
	whole(t)
	checkPhases(t, run(t, request(t, "tuned.py")))
	checkPhases(t, run(t, request(t, "compiled.py")))
}

// TestOddPrograms notes what a plan lacks, or may have otherwise than a real run.
func TestOddPrograms(t *testing.T) {
	whole(t)
	for program, says := range map[string]string{
		"once":    "the program ended after 1 of 2 optimizer steps: the plan has no steady step",
		"catches": "the program went on after ValueError: of a layer",
		"varies":  "batches differ in size: (1, 1024) and (2, 1024)",
		"idles":   "SGD of 1,048,576 parameters made 0 steps while another made 16",
	} {
		record := run(t, request(t, "odd.py", program))
		if !slices.ContainsFunc(record.Notes, func(n Note) bool { return strings.Contains(n.Text, says) }) {
			t.Errorf("%s: %v, want %s", program, record.Notes, says)
		}
	}
	if record := run(t, request(t, "linear.py")); len(record.Notes) > 0 {
		t.Errorf("a usual program has %v", record.Notes)
	}
}

// TestNothingIsLeft runs a program that writes, connects and starts processes.
func TestNothingIsLeft(t *testing.T) {
	folder := t.TempDir()
	kept := filepath.Join(folder, "kept")
	if err := os.WriteFile(kept, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("HF_HOME", filepath.Join(folder, "hub"))
	prepared := filepath.Join(folder, "hub", "datasets", "prepared")
	if err := errors.Join(os.MkdirAll(prepared, 0o700),
		os.WriteFile(filepath.Join(prepared, "data"), []byte("theirs"), 0o600)); err != nil {
		t.Fatal(err)
	}
	record := run(t, request(t, "writes.py", folder))
	entries, err := filepath.Glob(filepath.Join(folder, "*", "*", "*", "*"))
	outer, _ := os.ReadDir(folder)
	if err != nil || len(entries) != 1 || len(outer) != 2 {
		t.Errorf("left are %v (%v)", entries, err)
	}
	for _, n := range record.Notes {
		if n.Kind == "safety" {
			t.Log(n.Text)
		}
	}
	if left, _ := exec.Command("pgrep", "-f", folder).Output(); len(left) > 0 {
		t.Errorf("processes are left: %s", left)
	}
}

// TestWhatCannotBePlanned names what is in the way.
func TestWhatCannotBePlanned(t *testing.T) {
	file := func(text string) string {
		path := filepath.Join(t.TempDir(), "program.py")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	python := request(t, "linear.py").Command[0]
	const fails = "ValueError: of the program"
	for says, command := range map[string][]string{
		"there is no such program":              {"/nowhere/python", "x.py"},
		"is no program of Python":               {"sh", "x.sh"},
		"there is no such file":                 {python, "/nowhere/x.py"},
		"did not import torch":                  {python, file("print(1)")},
		"used no GPU":                           {python, file("import torch")},
		"without an optimizer step":             {python, file("import torch; torch.ones(1, device='cuda')")},
		"with status 3 without an":              {python, file("import torch; torch.ones(1, device='cuda'); exit(3)")},
		"with status 3 after 1 of 2":            {python, "testdata/odd.py", "fails"},
		"trained on the CPU":                    {python, "testdata/odd.py", "host"},
		"planned without a network":             {python, file("import torch, socket; socket.getaddrinfo('a.b', 1)")},
		fails:                                   {python, file("import torch; raise ValueError('of the program')")},
		"KeyError: 1 (OSError: why)":            {python, file("import torch; raise KeyError(1) from OSError('why')")},
		"was ended: it was not done after 20ms": {python, file("import time; time.sleep(1000)")},
	} {
		r := Request{Command: command, GPUs: 1, Nodes: 1, Steps: 2, Patience: 2 * time.Minute, Output: &bytes.Buffer{}}
		if strings.Contains(says, "20ms") {
			r.Patience = 20 * time.Millisecond
		}
		_, err := r.Run(context.Background())
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v: %v, want %s\n%s", command[1:], err, says, r.Output)
		}
		var bad *fault.Input
		const place = "program.py:1: import torch; raise"
		if says == fails && (!errors.As(err, &bad) || !strings.Contains(bad.Hint, place)) {
			t.Errorf("%v does not name its line", bad)
		}
	}
}
