package plan

import (
	"maps"
	"slices"
	"testing"

	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/origin"
	"plimsoll/internal/plan/origin/origintest"
)

// TestAddresses plans jobs of all kinds. Every component of every phase has a formula that evaluates to its bytes,
// digit by digit, and a source. The source is looked up in the frameworks that are installed.
func TestAddresses(t *testing.T) {
	sources := map[origin.Place]bool{}
	components := 0
	for name, request := range jobs(t) {
		p := planned(t, request)
		n, missing := origintest.Unaddressed(p.Devices)
		components += n
		for _, m := range missing {
			t.Errorf("%s: %s", name, m)
		}
		if p.Job.Optimizer.Compresses() {
			continue // DeepSpeed 0.19.7 has these no more
		}
		for _, d := range p.Devices {
			for _, p := range d.Phases {
				for _, c := range p.Components {
					if o := c.Origin; o != nil && o.File != "" {
						p := origin.Place{Project: origin.Project(o.Project), File: o.File, Function: o.Function}
						sources[p] = true
					}
				}
			}
		}
	}
	t.Logf("%d components of %d plans, %d sources", components, len(jobs(t)), len(sources))
	for _, missing := range origintest.Missing(t, slices.Collect(maps.Keys(sources))) {
		t.Error(missing)
	}
}

// TestAddressesOfExamples: so has every component of the plans of our own examples.
func TestAddressesOfExamples(t *testing.T) {
	for _, q := range []job.Request{
		{Configs: []string{"../../../examples/llama_factory.yaml"}},
		{Model: "qwen2.5-7b", GPUs: 2, DeepSpeed: "../../../examples/zero2_offload.json"},
		{Model: "llama-3-8b", GPUs: 8, DeepSpeed: "../../../examples/zero2_pageable.json"},
		{Model: "llama-3-8b", GPUs: 8, DeepSpeed: "../../../examples/pipeline.json"},
		{Model: "../../../examples/config.json", Adapter: "../../../examples/adapter_config.json"},
		{Model: "../../../examples/config.json", TrainingArgs: "../../../examples/training_args.json"},
	} {
		components, missing := origintest.Unaddressed(planned(t, q).Devices)
		for _, m := range missing {
			t.Errorf("%+v: %s", q, m)
		}
		if components == 0 {
			t.Errorf("%+v: no components", q)
		}
	}
}
