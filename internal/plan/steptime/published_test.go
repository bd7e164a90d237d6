package steptime

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/overlap"
	"plimsoll/internal/plan/roads"
)

const giga = 1e9

// hosts are the bandwidths by data sheet, of which programs move 80 %.
const (
	twoXeons8480 = 0.8 * 614 * giga  // 2 sockets x 8 channels of DDR5-4800
	two6972P     = 0.8 * 1229 * giga // 2 x 12 channels of DDR5-6400
	two7742      = 0.8 * 410 * giga  // 2 x 8 channels of DDR4-3200
	grace        = 486 * giga        // STREAM (arXiv 2407.07850)
)

// published are step times that others have published, in seconds.
var published = []struct {
	row     string
	seconds float64
	predict func(t *testing.T) Time
}{
	{"prime-rl, 8K", 1.75, primeRL(8<<10, false)}, {"prime-rl, 8K, full offload", 3.96, primeRL(8<<10, true)},
	{"prime-rl, 16K", 5.17, primeRL(16<<10, false)}, {"prime-rl, 16K, full offload", 5.73, primeRL(16<<10, true)},
	{"prime-rl, 64K", 38.7, primeRL(64<<10, false)}, {"prime-rl, 64K, full offload", 34.1, primeRL(64<<10, true)},
	{"CPUAdam on 2 x 6972P", 0.187, cpuAdam(two6972P)}, {"CPUAdam on 2 x 7742", 0.805, cpuAdam(two7742)},
	{"ZeRO-Offload, Qwen2.5-3B, 2 x 7742", 2.497, step(job.Request{Model: "qwen2.5-3b", GPUs: 2, GPU: "A100-40GB",
		DeepSpeed: "testdata/zo_config.json", Sequence: 512}, Machine{Rates: roads.Rates{Host: two7742}})},
	{"ZeRO-2, Qwen2.5-1.5B, 2 x A100", 0.240, step(job.Request{Model: "qwen2.5-1.5b", GPUs: 2, GPU: "A100-40GB",
		DeepSpeed: "testdata/zero2_config.json", Sequence: 512}, Machine{})},
	{"SuperOffload, Qwen3-14B, GH200", 3.43, step(job.Request{Model: "qwen3-14b", GPU: "GH200-96GB", Sequence: 4096,
		MicroBatch: 4, Recompute: "full", DeepSpeed: "testdata/superoffload_config.json"},
		Machine{Rates: roads.Rates{Host: grace, Link: roads.Link{In: 411 * giga, Out: 170 * giga}}})},
}

// step predicts a job.
func step(q job.Request, m Machine) func(*testing.T) Time {
	return func(t *testing.T) Time { return resolved(t, q, m).Total }
}

func resolved(t *testing.T, q job.Request, m Machine) *Step {
	t.Helper()
	j, err := q.Resolve()
	if err != nil {
		t.Fatal(err)
	}
	s, err := Predict(j, m, j.Model.Elements(), nil)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// primeRLBytes is what full offload moves for each parameter: AdamW, gradients from 16 bits to 32, and the 16-bit copy.
const primeRLBytes = adamBytes + 6 + 2

// primeRL predicts a step over 8 H200 as the branch of the pull request configures it. With full offload a native AdamW
// updates each parameter when its gradient is there, behind the backward pass, and the next step waits for all.
func primeRL(sequence int, offloads bool) func(*testing.T) Time {
	return func(t *testing.T) Time {
		q := job.Request{Model: "qwen3-30b-a3b", GPUs: 8, GPU: "H200", FSDP: "2", Precision: "amp-bf16",
			ExpertParallel: 8, Attention: "flash", Sequence: sequence, Recompute: "full", Loss: "fused",
			Optimizer: "adamw/for-loop"}
		s := resolved(t, q, Machine{})
		if !offloads {
			return s.Total
		}
		j, err := q.Resolve()
		if err != nil {
			t.Fatal(err)
		}
		total := Time{}
		for end, to := range []struct {
			to                           *time.Duration
			forward, backward, exchanges time.Duration
		}{{&total.Expected, s.Forward.Expected, s.Backward.Expected, s.Communication.Expected},
			{&total.Most, s.Forward.Most, s.Backward.Most, s.Communication.Most},
			{&total.Least, s.Forward.Least, s.Backward.Least, s.Communication.Least}} {
			r := ratesAt(j, Machine{Rates: roads.Rates{Host: twoXeons8480}}, end)
			each := j.Model.Elements() / 8
			wait := r.CPU(roads.CPU{Traffic: ledger.Bytes(each * primeRLBytes), Gradients: ledger.Bytes(2 * each),
				Parameters: ledger.Bytes(2 * each), Mode: overlap.Backward, Layers: Layers(j)},
				roads.Job{Ranks: 8, Backward: to.backward})
			*to.to = to.forward + to.backward + to.exchanges + wait.Exposed
		}
		return total
	}
}

// cpuAdam predicts an update of 3.086 billion parameters by DeepSpeed's CPUAdam.
func cpuAdam(bandwidth float64) func(*testing.T) Time {
	return func(*testing.T) Time {
		at := func(end int) time.Duration {
			return time.Duration(3.086 * giga * adamBytes / (bandwidth * shares.host[end]) * float64(time.Second))
		}
		return Time{at(0), at(2), at(1)}
	}
}

// checkInside compares what the page says of intervals.
func checkInside(t *testing.T, text []byte, inside, rows int) {
	t.Helper()
	want := fmt.Sprintf("The interval contains what was published in %d of %d rows", inside, rows)
	if !strings.Contains(string(text), want) {
		t.Errorf("docs/step-time.md lacks %q", want)
	}
}

// TestPublished compares the table of docs/step-time.md with what is predicted. The page says why rows miss.
func TestPublished(t *testing.T) {
	inside := 0
	text, err := os.ReadFile("../../../docs/step-time.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range published {
		got := p.predict(t)
		off := got.Expected.Seconds()/p.seconds - 1
		row := fmt.Sprintf("| %s | %.3g s | %.3g s | %.3g to %.3g | %+.0f %% |", p.row, p.seconds,
			got.Expected.Seconds(), got.Least.Seconds(), got.Most.Seconds(), 100*off)
		if !strings.Contains(string(text), row) {
			t.Errorf("docs/step-time.md lacks the row\n%s", row)
		}
		if got.Least > got.Expected || got.Expected > got.Most {
			t.Errorf("%s: %v", p.row, got)
		}
		if published := p.seconds; got.Least.Seconds() <= published && published <= got.Most.Seconds() {
			inside++
		}
	}
	checkInside(t, text, inside, len(published))
}
