package plan

import (
	"slices"
	"testing"

	"plimsoll/ledger"
)

// TestFormulas plans jobs of all kinds. The formula of every component of every phase evaluates to its bytes, digit by
// digit.
func TestFormulas(t *testing.T) {
	for name, request := range jobs(t) {
		t.Run(name, func(t *testing.T) {
			for _, d := range planned(t, request).Devices {
				checkFormulas(t, &d)
			}
		})
	}
}

// withoutOrigin are components of jobs whose source is not known yet: modules of other libraries than transformers, and
// optimizers beside those of package origin.
var withoutOrigin = map[string][]ledger.Component{
	"flash, chunked": {ledger.LogitsAndLoss, ledger.NormActivations, ledger.FeedForwardActivations,
		ledger.AttentionActivations},
	"FSDP2, torchtitan": {ledger.LogitsAndLoss, ledger.NormActivations, ledger.FeedForwardActivations,
		ledger.AttentionActivations, ledger.ResidualActivations, ledger.EmbeddingActivations},
	"ZeRO-0":                        {ledger.MasterWeights, ledger.MasterGradients},
	"optimizer lamb":                {ledger.MasterWeights, ledger.MasterGradients},
	"optimizer onebitadam":          {ledger.MasterWeights, ledger.MasterGradients},
	"optimizer onebitlamb":          {ledger.MasterWeights, ledger.MasterGradients},
	"optimizer zerooneadam":         {ledger.MasterWeights, ledger.MasterGradients},
	"on the CPU":                    {ledger.MatmulWorkspaces},
	"on the CPU, bf16":              {ledger.MatmulWorkspaces},
	"optimizer lion":                ofOptimizer,
	"optimizer schedule-free-sgd":   ofOptimizer,
	"optimizer schedule-free-radam": ofOptimizer,
	"optimizer schedule-free-adamw": ofOptimizer,
	"optimizer muon-moonlight":      ofOptimizer,
	"optimizer muon-dion":           ofOptimizer,
	"optimizer galore-adamw":        ofOptimizer,
	"optimizer galore-adamw-8bit":   ofOptimizer,
	"optimizer galore-adafactor":    ofOptimizer,
	"optimizer badam":               ofOptimizer,
	"optimizer apollo-adamw":        ofOptimizer,
	"optimizer adamw_apex_fused":    ofOptimizer,
	"optimizer adamw-apex":          ofOptimizer,
	"optimizer adam-mini":           ofOptimizer,
}

var ofOptimizer = []ledger.Component{ledger.OptimizerStates}

// neverWithOrigin are components without an origin in any job.
var neverWithOrigin = []ledger.Component{ledger.Batch, ledger.PythonProcess, ledger.OperationScratch, ledger.NCCL,
	ledger.AdapterActivations, ledger.OptimizerTemporaries}

// TestOrigins wants an origin for every component of the plans of all kinds of jobs, but for those that are listed.
func TestOrigins(t *testing.T) {
	for name, request := range jobs(t) {
		for _, d := range planned(t, request).Devices {
			for _, p := range append(slices.Clone(d.Phases), ledger.Phase{Components: d.Outside}) {
				for _, c := range p.Components {
					expected := !slices.Contains(withoutOrigin[name], c.Component) &&
						!slices.Contains(neverWithOrigin, c.Component)
					if (c.Origin != nil) != expected {
						t.Errorf("%s: the origin of %s is %v", name, c.Component, c.Origin)
					}
				}
			}
		}
	}
}

// checkFormulas evaluates the formulas of a device.
func checkFormulas(t *testing.T, d *ledger.Device) {
	t.Helper()
	for _, p := range append(slices.Clone(d.Phases), ledger.Phase{Name: "all phases", Components: d.Outside}) {
		for _, c := range p.Components {
			if sum, ok := c.Formula.Bytes(); !ok || sum != c.Bytes {
				t.Errorf("%s, %s %s: %s has %v, and its formula is %q", d.Kind, p.Iteration, p.Name, c.Component,
					c.Bytes.Exact(), c.Formula)
			}
		}
	}
}
