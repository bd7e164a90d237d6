package plan

import (
	"fmt"
	"testing"
	"time"

	"plimsoll/dtype"
	"plimsoll/forward"
	"plimsoll/model"
)

func TestProbe(t *testing.T) {
	m, err := model.Load("llama-3.2-1b")
	if err != nil {
		t.Fatal(err)
	}
	o := optimizerKinds["adamw"]
	o.Variant = Foreach
	j := &Job{Model: m, World: 1, MicroBatch: 2, Sequence: 512, Weights: dtype.BF16, Attention: forward.SDPA, HoldsOutputs: true, Optimizer: o}
	start := time.Now()
	s := newSimulation(j, newTrace(nil), newTrace(nil))
	s.engine = &plain{simulation: s}
	s.run()
	fmt.Println(time.Since(start))
	for _, p := range s.gpu.phases {
		fmt.Println(p.Name, p.Iteration, p.PeakRequested, p.EndRequested)
		for _, c := range p.Components {
			fmt.Println("    ", c.Name, c.Bytes.Exact())
		}
	}
}
