//go:build linux

package bench

import (
	"context"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"plimsoll/internal/base/activity"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/torchtest"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/state/optim/kernel"
)

// silent ignores progress.
type silent struct{}

func (silent) Begin(string, int64, activity.Unit) {}
func (silent) Advance(int64)                      {}
func (silent) End()                               {}

// hostWith returns this host with a given amount of available memory.
func hostWith(t *testing.T, available ledger.Bytes) *host.Host {
	h, err := host.Local()
	if err != nil {
		t.Fatal(err)
	}
	h.Memory = host.Memory{Total: 2 * available, Available: available}
	h.HugePages.Pools = nil
	return h
}

// TestMain lets the short suite measure for a short time: what is measured then is not precise, and all of it is there.
func TestMain(m *testing.M) {
	flag.Parse()
	if testing.Short() {
		leastSample, collectingTime = 10*time.Millisecond, 20*time.Millisecond
	}
	os.Exit(m.Run())
}

// usual returns the request of the command without flags.
func usual() Request {
	return Request{Optimizer: "adamw", State: "split", Moments: "fp32", GradientType: "bf16", Rounds: 1}
}

func planOf(t *testing.T, r Request, available ledger.Bytes) *Suite {
	p, err := NewSuite(r, hostWith(t, available))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestRun(t *testing.T) {
	r := usual()
	r.State, r.Moments, r.Norm, r.Journal, r.Checks = All, "bf16", true, true, true
	r.Parameters, r.Workers = []string{"1001", "200001"}, []int{1}
	if testing.Short() {
		r.Parameters = r.Parameters[1:]
	}
	p := planOf(t, r, ledger.GiB)
	results, err := p.Run(context.Background(), silent{})
	if err != nil {
		t.Fatal(err)
	}
	if len(results) != 3*len(r.Parameters) {
		t.Fatalf("%d results", len(results))
	}
	checkSamples(t, r, results)
	checked := results[len(r.Parameters)-1].Checked
	if checked == nil {
		t.Fatal("nothing was checked")
	}
	if checked.Collections == 0 || checked.Stops.NineInTen <= 0 || checked.IdleStops.NineInTen <= 0 ||
		checked.Denormal.Min <= 0 {
		t.Errorf("%+v", checked)
	}
}

// TestStallsMakeNoSampleShort: other processes hold up some of the steps that say how many a sample needs. The clock of
// the test has a step of 100 us, and a stall now and then.
func TestStallsMakeNoSampleShort(t *testing.T) {
	r := usual()
	r.Parameters, r.Workers = []string{"1001"}, []int{1}
	c := planOf(t, r, ledger.GiB).Cases[0]
	state, err := MakeState(context.Background(), c.Shards)
	defer func() { _ = closeAll(state) }()
	if err != nil {
		t.Fatal(err)
	}
	s, err := newSteps(c, state, false)
	if err != nil {
		t.Fatal(err)
	}
	const step = 100 * time.Microsecond
	var clock time.Time
	calls := 0
	s.now = func() time.Time {
		if calls++; calls%2 == 0 {
			clock = clock.Add(step)
		}
		if calls%4 == 0 { // every other step
			clock = clock.Add(leastSample)
		}
		return clock
	}
	if got, want := s.calibrate(), int(leastSample/step); got != want {
		t.Errorf("a sample has %d steps, expected %d", got, want)
	}
}

// TestRunOfRanks measures the steps of two ranks of four, with all that a case can have.
func TestRunOfRanks(t *testing.T) {
	r := usual()
	r.Norm, r.Journal, r.Checks, r.Ranks, r.WorldSize = true, true, true, 2, 4
	r.Parameters, r.Workers = []string{"1000001"}, []int{1}
	results, err := planOf(t, r, ledger.GiB).Run(context.Background(), silent{})
	if err != nil {
		t.Fatal(err)
	}
	checkSamples(t, r, results)
	if c := results[0]; c.Held != 500_004 || c.Checked == nil || c.Checked.Denormal.Min <= 0 {
		t.Errorf("%v: %+v", c.Case, c.Checked)
	}
}

// checkSamples expects each pass in each sample. Only steps have more than traffic and update.
func checkSamples(t *testing.T, r Request, results []Result) {
	t.Helper()
	for _, result := range results {
		if len(result.Samples) != r.Rounds || result.Rounds.Contended > r.Rounds ||
			result.Rounds.ThrownAway > r.Rounds {
			t.Errorf("%v: %d samples, %+v", result.Case, len(result.Samples), result.Rounds)
		}
		for _, s := range result.Samples {
			whole := s.Norm > 0 && s.StepUpdate > 0 && s.Step > s.StepUpdate && s.Arrived > 0 && s.Journaled > 0
			none := s.Norm == 0 && s.Step == 0 && s.StepUpdate == 0 && s.Arrived == 0 && s.Journaled == 0
			if s.Traffic <= 0 || s.Update <= 0 || s.Fraction <= 0 || len(s.TrafficTurns) != blocksOfSample ||
				result.InCore && !none || !result.InCore && !whole {
				t.Errorf("%v: %+v", result.Case, s)
			}
			if took := s.Step * float64(result.Repeats); !result.InCore && took < leastSample.Seconds()/10 {
				t.Errorf("%v: the steps of a sample take %g s", result.Case, took)
			}
		}
		if (result.Checked != nil) != result.Checks {
			t.Errorf("%v: checks %+v", result.Case, result.Checked)
		}
	}
}

// TestDenormalMoments checks that the check's denormal numbers are denormal.
func TestDenormalMoments(t *testing.T) {
	for _, bits := range []uint32{denormalBits, denormalBits &^ 0xffff} { // fp32, and the part that bf16 keeps
		if bits == 0 || bits&0x7f80_0000 != 0 {
			t.Errorf("%#x is no denormal number", bits)
		}
	}
}

func TestInterruptedBenchmarkEnds(t *testing.T) {
	ctx, cancel := context.WithCancelCause(context.Background())
	stop := errors.New("stop")
	cancel(stop)
	r := usual()
	r.Parameters = []string{"1000"}
	if _, err := planOf(t, r, ledger.GiB).Run(ctx, silent{}); !errors.Is(err, stop) {
		t.Errorf("got %v", err)
	}
}

func TestPeer(t *testing.T) {
	t.Setenv(PythonVariable, torchtest.Python(t))
	r := usual()
	r.Parameters, r.Workers, r.Peer = []string{"1Mi"}, []int{1}, PeerTorch
	results, err := planOf(t, r, 4*ledger.GiB).Run(context.Background(), silent{})
	if err != nil {
		t.Fatal(err)
	}
	torch := results[0].Compared
	if torch == nil || torch.Version == "" {
		t.Fatalf("%+v", results[0])
	}
	for _, name := range []string{"single", "foreach", "fused", "sequence"} {
		if seconds := results[0].Samples[0].Peer[name]; seconds <= 0 {
			t.Errorf("%s took %g s", name, seconds)
		}
	}
	for _, v := range torch.Variants {
		most := peerExtraBytes * ledger.MiB
		// It is 2 MiB and more, but the kernel counts a process's pages in batches on each CPU.
		if least := ledger.MiB; v.Name == "foreach" && v.Extra < least || v.Extra > most {
			t.Errorf("%s took %v beside its tensors", v.Name, v.Extra)
		}
	}
}

// TestDeepSpeed runs DeepSpeed's own kernel, which it builds where necessary, in DeepSpeed's own sequence.
func TestDeepSpeed(t *testing.T) {
	if testing.Short() {
		t.Skip("TestPeer compares with torch in the same way; DeepSpeed is imported, and its kernel built")
	}
	t.Setenv(PythonVariable, torchtest.Python(t, PeerDeepSpeed))
	r := usual()
	r.Parameters, r.Workers, r.Peer = []string{"8Mi"}, []int{1}, PeerDeepSpeed
	results, err := planOf(t, r, 4*ledger.GiB).Run(context.Background(), silent{})
	if err != nil {
		t.Fatal(err)
	}
	found, sample := results[0].Compared, results[0].Samples[0]
	if found.Name != PeerDeepSpeed || !strings.Contains(found.Version, " with torch 2.") || len(found.Variants) != 2 {
		t.Errorf("%+v", found)
	}
	kernel, sequence := sample.Peer["cpu_adam"], sample.Peer["sequence"]
	if kernel <= 0 || sequence <= kernel {
		t.Errorf("the update takes %g s, and the sequence with it %g s", kernel, sequence)
	}
	for _, v := range found.Variants {
		if v.WholeStep != (v.Name == "sequence") || v.Extra > 8*ledger.MiB {
			t.Errorf("%+v", v)
		}
	}
}

// TestPeerThatFails expects the peer's last output in the error.
func TestPeerThatFails(t *testing.T) {
	python := filepath.Join(t.TempDir(), "python")
	if err := os.WriteFile(python, []byte("#!/bin/sh\necho first >&2; echo no such tensor >&2; exit 3\n"),
		0o755); err != nil {
		t.Fatal(err)
	}
	p := planOf(t, usual(), ledger.GiB)
	_, err := startPeer(context.Background(), python, PeerTorch, p.Cases[0].Shards[0])
	if err == nil || !errors.As(err, new(interface{ ExitCode() int })) {
		t.Fatalf("got %v", err)
	}
	if want := "exit status 3: no such tensor"; !contains(err, want) {
		t.Errorf("got %v, want %s", err, want)
	}
}

// TestRanksOfPeersWorkAtOnce: a step takes as long as the slowest rank, and the memory of all.
func TestRanksOfPeersWorkAtOnce(t *testing.T) {
	python := filepath.Join(t.TempDir(), "python")
	// It is called with -c, the script and the request, and takes as many seconds as there are elements.
	fake := `#!/bin/sh
elements=$(echo "$3" | sed 's/.*"elements":\([0-9]*\).*/\1/')
echo '{"version": "1", "variants": [{"name": "fast"}]}'
while read variant; do echo "{\"seconds\": $elements, \"extra_bytes\": 10}"; done
`
	if err := os.WriteFile(python, []byte(fake), 0o755); err != nil {
		t.Fatal(err)
	}
	r := usual()
	r.Parameters, r.Ranks = []string{"1001"}, 2
	peers, err := startPeers(context.Background(), python, planOf(t, r, ledger.GiB).Cases[0])
	if err != nil {
		t.Fatal(err)
	}
	seconds, err := peers.round()
	if err != nil || seconds["fast"] != 502 {
		t.Errorf("%v, %v; the first rank has 502 elements", seconds, err)
	}
	if extra := peers.found().Variants[0].Extra; extra != 20 || len(peers.ids()) != 2 {
		t.Errorf("%v of %v", extra, peers.ids())
	}
	if err := closeAll(peers); err != nil {
		t.Error(err)
	}
}

// TestKernelIsTheOneThatWasForced checks that a benchmark measures the kernel that was asked for.
func TestKernelIsTheOneThatWasForced(t *testing.T) {
	t.Setenv(kernel.EnvironmentVariable, "generic")
	for _, c := range planOf(t, usual(), 64*ledger.GiB).Cases {
		if c.Shards[0].Kernel != kernel.Generic {
			t.Errorf("%v uses %v", c, c.Shards[0].Kernel)
		}
	}
}
