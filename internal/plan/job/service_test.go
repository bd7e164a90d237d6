package job_test

import (
	"strings"
	"testing"

	"plimsoll/internal/plan/job"
)

// TestTierIsRefused: a tier that nothing would use, or that no window fits into, is an error that names it.
func TestTierIsRefused(t *testing.T) {
	q := job.Request{Model: "llama-3.2-1b", Precision: "bf16", Sequence: 512, GPU: "H100-80GB"}
	disk := job.Tier{Disks: 1}
	for name, test := range map[string]struct {
		optimizer string
		offload   job.Offload
		want      string
	}{
		"another optimizer":       {"adamw", job.Offload{Tier: disk}, "--tier says where the optimizer service"},
		"states that come and go": {"adamw", job.Offload{What: job.OffloadStates, Tier: disk}, "--tier says where"},
		"no tier":                 {"plimsoll", job.Offload{Tier: job.Tier{Memory: 1}}, "there is no --tier"},
		"a service that offloads": {"plimsoll", job.Offload{What: job.OffloadStates}, "both say where"},
	} {
		q.Optimizer, q.Offload = test.optimizer, test.offload
		_, err := q.Resolve()
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v, want %q", name, err, test.want)
		}
	}
}
