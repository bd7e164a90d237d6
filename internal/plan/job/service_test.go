package job_test

import (
	"strings"
	"testing"

	"plimsoll/internal/base/ledger"
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
		"another optimizer":        {"adamw", job.Offload{Tier: disk}, "--tier says where the optimizer service"},
		"states that come and go":  {"adamw", job.Offload{What: job.OffloadStates, Tier: disk}, "--tier says where"},
		"no tier":                  {"plimsoll", job.Offload{Tier: job.Tier{Memory: 1}}, "there is no --tier"},
		"tenants of another":       {"adamw", job.Offload{Tenants: 2}, "--tenants counts states of the optimizer"},
		"tenants on disks":         {"plimsoll", job.Offload{Tenants: 2, Tier: disk}, "--tenants is given, and --tier"},
		"fewer than none":          {"plimsoll", job.Offload{Tenants: -1}, "--tenants is -1"},
		"more than any host holds": {"plimsoll", job.Offload{Tenants: 1 << 40}, "expected at most 1000000"},
		"a service that offloads":  {"plimsoll", job.Offload{What: job.OffloadStates}, "both say where"},
	} {
		q.Optimizer, q.Offload = test.optimizer, test.offload
		_, err := q.Resolve()
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v, want %q", name, err, test.want)
		}
	}
}

// TestTenants: each tenant has a state of its own in the service.
func TestTenants(t *testing.T) {
	bytes := func(tenants int) ledger.Bytes {
		t.Helper()
		q := job.Request{Model: "llama-3.2-1b", Precision: "bf16", AdapterPrecision: "bf16", Sequence: 512,
			GPU: "H100-80GB", Shorthand: job.Shorthand{LoRA: 32}, Optimizer: "plimsoll",
			Offload: job.Offload{Tenants: tenants}}
		j, err := q.Resolve()
		if err != nil {
			t.Fatal(err)
		}
		held, err := j.Offload.ServiceBytes(j, 10_000_000)
		if err != nil {
			t.Fatal(err)
		}
		return held
	}
	if one := bytes(0); bytes(1) != one || bytes(200) != 200*one || one < 140_000_000 || one > 140_500_000 {
		t.Errorf("one tenant of 10 million parameters takes %v, and 200 take %v", one, bytes(200))
	}
}
