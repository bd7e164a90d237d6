package plan

import (
	"strings"
	"testing"

	"plimsoll/internal/plan/job"
)

// TestMegatronRoads: what leaves a GPU is on the host, whose memory counts for the verdict.
func TestMegatronRoads(t *testing.T) {
	q := job.Request{GPU: "H100-80GB", GPUs: 8, HostMemory: 31 << 30,
		MegatronArguments: job.MegatronArguments{Megatron: strings.Join(strings.Fields(smallGPT), " ")}}
	r, err := NewMegatronRoads(q)
	if err != nil {
		t.Fatal(err)
	}
	resident := r.Roads[0]
	if len(r.Roads) != 4 || resident.Freed != 0 || resident.Host != 0 || resident.Window == 0 {
		t.Fatalf("%+v", r.Roads)
	}
	results := []Result{Fits, Fits, Fits, Tight}
	for i, road := range r.Roads[1:] {
		if road.Freed <= 0 || road.Host < road.Freed || road.Pinned <= 0 || road.GPU >= resident.GPU {
			t.Errorf("%+v", road)
		}
		if road.Verdict != results[i+1] {
			t.Errorf("%s: %s, expected %s: %v on the host", road.Name, road.Verdict, results[i+1], road.Host)
		}
	}
	if whole, chunks := r.Roads[1], r.Roads[2]; whole.Window <= chunks.Window || whole.Freed < chunks.Freed {
		t.Errorf("whole %+v, in chunks %+v", whole, chunks)
	}
}
