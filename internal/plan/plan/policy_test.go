package plan

import (
	"strings"
	"testing"

	"plimsoll/internal/base/files"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
)

// policyPlan plans a script of slime with further arguments.
func policyPlan(t *testing.T, more, engine string, host ledger.Bytes) *Plan {
	t.Helper()
	const script = "python3 train.py --actor-num-gpus-per-node 4 --colocate --num-layers 12 --hidden-size 2048 " +
		"--num-attention-heads 16 --ffn-hidden-size 8192 --swiglu --vocab-size 151936 " +
		"--untie-embeddings-and-output-weights --position-embedding-type rope --tensor-model-parallel-size 2 " +
		"--rollout-batch-size 16 --n-samples-per-prompt 8 --global-batch-size 128 --use-dynamic-batch-size " +
		"--max-tokens-per-gpu 4096 --rollout-max-response-len 2048 --rollout-num-gpus-per-engine 2 " +
		"--sglang-mem-fraction-static 0.5 --optimizer adam --recompute-granularity full --recompute-method uniform " +
		"--recompute-num-layers 1 "
	q := job.Request{GPU: "H100-80GB", HostMemory: host, Shorthand: job.Shorthand{Rollout: engine},
		MegatronArguments: job.MegatronArguments{Megatron: "run.sh"}}
	q.Texts = files.Texts{"run.sh": []byte(script + more + "\n")}
	return planned(t, q)
}

// upper returns the upper end of the first device of a kind, and the source that makes it.
func upper(t *testing.T, p *Plan, kind ledger.Kind) (ledger.Bytes, string) {
	t.Helper()
	for i := range p.Devices {
		if d := &p.Devices[i]; d.Kind == kind {
			return d.Interval.Upper, d.Interval.Largest().Name
		}
	}
	t.Fatalf("no %s", kind)
	return 0, ""
}

// TestSamplesWithoutBound: where code of the user makes samples of several turns, a job never fits before something
// bounds them. The bound is the engine's context, or what its cache has room for.
func TestSamplesWithoutBound(t *testing.T) {
	const turns = "--custom-generate-function-path turns.generate "
	if v := policyPlan(t, "", "", 0).Verdict; v.Result != Fits {
		t.Errorf("without code of the user the verdict is %s", v.Result)
	}
	if v := policyPlan(t, turns, "", 0).Verdict; v.Result != Tight || v.Source != "samples of any length" {
		t.Errorf("with samples of any length the verdict is %s for %s", v.Result, v.Source)
	}
	if v := policyPlan(t, turns+"--rollout-max-context-len 4096", "", 0).Verdict; v.Result != Fits {
		t.Errorf("with a bound the verdict is %s", v.Result)
	}
	short, _ := upper(t, policyPlan(t, turns+"--sglang-context-length 16384", "", 0), ledger.GPU)
	long, _ := upper(t, policyPlan(t, turns+"--sglang-context-length 65536", "", 0), ledger.GPU)
	any, _ := upper(t, policyPlan(t, turns, "", 0), ledger.GPU)
	if !(short < long && long < any) {
		t.Errorf("upper ends are %v, %v and %v for longer contexts", short, long, any)
	}
}

// TestEarlierReleases: an earlier release of slime moves parameters and gradients to the host. The upper end has room
// for them, as for a plan that says so, and release=current leaves them out.
func TestEarlierReleases(t *testing.T) {
	const host = ledger.TiB
	may, _ := upper(t, policyPlan(t, "", "", host), ledger.Host)
	current, _ := upper(t, policyPlan(t, "", "release=current", host), ledger.Host)
	p := policyPlan(t, "", "backups=all", host)
	moved, _ := upper(t, p, ledger.Host)
	sync := in(t, p, ledger.Host, ledger.WeightSync)
	if current >= may || may < sync.PeakUsed || float64(may) < .97*float64(moved) {
		t.Errorf("upper ends are %v, %v for the current release and %v for an earlier one", may, current, moved)
	}
	gpu, source := upper(t, policyPlan(t, "", "", 0), ledger.GPU)
	without, _ := upper(t, policyPlan(t, "", "release=current", 0), ledger.GPU)
	if gpu < without || strings.Contains(source, "current") {
		t.Errorf("upper ends of the GPU are %v and %v for the current release", gpu, without)
	}
}

// TestVerdictNamesWhatIsLeftOut: a job says what its verdict does not count.
func TestVerdictNamesWhatIsLeftOut(t *testing.T) {
	const experts = "--moe-enable-deepep --sequence-parallel --num-experts 8 --moe-grouped-gemm " +
		"--moe-token-dispatcher-type flex"
	for more, want := range map[string]string{
		experts:                            "the buffers of DeepEP",
		"":                                 "",
		"--no-colocate":                    "the GPUs of SGLang",
		"--rollout-max-response-len 20000": "prompts, whose length nothing says",
	} {
		if got := strings.Join(policyPlan(t, more, "", 0).Job.LeftOut, "; "); got != want {
			t.Errorf("%s: left out %q, want %q", more, got, want)
		}
	}
}
