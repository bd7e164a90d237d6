package origin

import (
	"encoding/csv"
	"os"
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/version"
)

// TestPlacesOfReleases asks for components whose place has moved, in releases before and after.
func TestPlacesOfReleases(t *testing.T) {
	for _, x := range []struct {
		engine    string
		component ledger.Component
		project   Project
		release   string
		want      string
	}{
		{FSDP2, ledger.Gradients, PyTorch, "2.5.1",
			"PyTorch 2.5.1, torch/distributed/_composable/fsdp/_fsdp_collectives.py, foreach_reduce"},
		{FSDP2, ledger.Gradients, PyTorch, "2.6",
			"PyTorch 2.6, torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, foreach_reduce"},
		{ZeRO3, ledger.PinningCopies, DeepSpeed, "0.19.4",
			"DeepSpeed 0.19.4, deepspeed/accelerator/cuda_accelerator.py, CUDA_Accelerator.pin_memory"},
		{ZeRO3, ledger.PinningCopies, DeepSpeed, "0.19.5",
			"DeepSpeed 0.19.5, deepspeed/accelerator/abstract_accelerator.py, DeepSpeedAccelerator.pin_memory"},
	} {
		j := Job{Engine: x.engine, Releases: map[Project]version.Version{x.project: release(x.release)}}
		if got := Of(j, x.component); got == nil || got.String() != x.want {
			t.Errorf("%v, want %s", got, x.want)
		}
	}
}

// TestScopes: the narrowest scope decides, a component before what it is a part of.
func TestScopes(t *testing.T) {
	llama := Job{Engine: Plain, Modules: "transformers", Adapter: "LORA", Loss: "of transformers", ModelType: "gpt-neo",
		Architecture: "GPTNeoForCausalLM"}
	const forward = "transformers, transformers/models/gpt_neo/modeling_gpt_neo.py, GPTNeoForCausalLM.forward"
	for c, want := range map[ledger.Component]string{
		ledger.NormActivations:       forward,
		ledger.AdapterActivations:    "PEFT, peft/tuners/lora/layer.py, Linear.forward",
		ledger.RecomputedActivations: "PyTorch, torch/utils/checkpoint.py, checkpoint",
		ledger.LogitsAndLoss:         "transformers, transformers/loss/loss_utils.py, ForCausalLMLoss",
	} {
		if got := Of(llama, c); got == nil || got.String() != want {
			t.Errorf("%s: %v, want %s", c, got, want)
		}
	}
	llama.Releases = map[Project]version.Version{Transformers: {Major: 4, Minor: 45}}
	if got := Of(llama, ledger.LogitsAndLoss); got == nil || got.Function != "GPTNeoForCausalLM.forward" {
		t.Errorf("before transformers 4.46 the loss is of %v", got)
	}
	unknown := Job{Engine: Plain, Modules: UnknownModules}
	if got := Of(unknown, ledger.NormActivations); got == nil || got.File != "" || got.Note == "" {
		t.Errorf("modules of an unknown library have the origin %v", got)
	}
}

// TestTable: a place is a file and a function, or has a note. Its component is one of the ledger. Its project and its
// bounds are among the releases that "make origins" reads.
func TestTable(t *testing.T) {
	opened, err := os.Open("releases.csv")
	if err != nil {
		t.Fatal(err)
	}
	defer opened.Close()
	rows, err := csv.NewReader(opened).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	read := map[Project][]string{}
	for _, row := range rows {
		read[Project(row[0])] = strings.Fields(row[2])
	}
	known := knownComponents(t)
	for e, places := range table() {
		if !slices.Contains(known, e.component) {
			t.Errorf("%s: there is no component %s", e.scope, e.component)
		}
		for _, p := range places {
			if (p.File == "") != (p.Function == "") || p.File == "" && p.Note == "" {
				t.Errorf("%s, %s: %+v", e.scope, e.component, p)
			}
			if p.File != "" && len(read[p.Project]) == 0 && !slices.Contains(unpublished, p.Project) {
				t.Errorf("%s: no release of %s is read", e.scope, p.Project)
			}
			for _, bound := range []version.Version{p.Since, p.Until} {
				if !bound.IsZero() && !slices.ContainsFunc(read[p.Project], func(text string) bool {
					r := release(text)
					return r.Major == bound.Major && r.Minor == bound.Minor
				}) {
					t.Errorf("%s, %s: %v of %s is not read", e.scope, e.component, bound, p.Project)
				}
			}
		}
	}
}

// unpublished are projects that PyPI does not have: apex, and our own.
var unpublished = []Project{"apex", "Plimsoll"}

// knownComponents returns the components of package ledger.
func knownComponents(t *testing.T) (list []ledger.Component) {
	source, err := os.ReadFile("../../base/ledger/component.go")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(source)) {
		if _, value, is := strings.Cut(line, " Component = "); is {
			list = append(list, ledger.Component(strings.Trim(strings.TrimSpace(value), `"`)))
		}
	}
	return list
}

// Table returns all places that some releases have, for the tests of the table.
func Table(j Job) []Place {
	var all []Place
	for _, list := range table() {
		if p := j.newest(list); p != nil && p.File != "" && !strings.Contains(p.File, "{") {
			all = append(all, *p)
		}
	}
	return all
}
