package report

import (
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/gpu"
	"plimsoll/internal/input/model"
)

// CatalogSchema is the schema of the JSON document.
const CatalogSchema = "plimsoll.models/1"

// Catalog is the document of the models, or of the GPUs, that are known by name.
type Catalog struct {
	Schema  string         `json:"schema"`
	Version string         `json:"version"`
	Models  []CatalogModel `json:"models,omitempty"`
	GPUs    []CatalogGPU   `json:"gpus,omitempty"`
}

// CatalogModel is a model of the catalog.
type CatalogModel struct {
	Name         string `json:"name"`
	Architecture string `json:"architecture"`
	Parameters   int64  `json:"parameters"`
}

// CatalogGPU is a GPU with what its data sheet says. Unknown figures are 0.
type CatalogGPU struct {
	Name      string       `json:"name"`
	Memory    ledger.Bytes `json:"memory_bytes"`
	Bandwidth float64      `json:"memory_gb_per_second"`
	Half      float64      `json:"half_tflops"` // of 16-bit matrices, without sparsity
	Host      float64      `json:"host_gb_per_second"`
	Peer      float64      `json:"peer_gb_per_second"`
}

// NewModels makes the document of models.
func NewModels(version string, models []*model.Model) *Catalog {
	c := &Catalog{Schema: CatalogSchema, Version: version}
	for _, m := range models {
		c.Models = append(c.Models, CatalogModel{m.Name, m.Architecture, m.Elements()})
	}
	return c
}

// NewGPUs makes the document of GPUs.
func NewGPUs(version string, gpus []gpu.Model) *Catalog {
	c := &Catalog{Schema: CatalogSchema, Version: version}
	for _, g := range gpus {
		c.GPUs = append(c.GPUs, CatalogGPU{g.Name, g.Memory, g.Bandwidth, g.Speed.Half, g.Speed.Host, g.Speed.Peer})
	}
	return c
}

// Page shows a table of the models or of the GPUs.
func (c *Catalog) Page() *Page {
	if len(c.GPUs) > 0 {
		t := (&Table{Style: Plain}).with(Words, "GPU").with(Bytes, "memory").
			with(Number, "memory GB/s", "16-bit TFLOP/s", "to the host GB/s", "to a GPU GB/s")
		for _, g := range c.GPUs {
			t.add(g.Name, g.Memory, rate(g.Bandwidth), rate(g.Half), rate(g.Host), rate(g.Peer))
		}
		return &Page{Title: "GPUs", Document: c, Sections: []Section{{t}, {Paragraph(
			"memory: what PyTorch can use; all else is of the data sheet, links in one direction; ?: not known")}}}
	}
	t := (&Table{Style: Plain}).with(Words, "model").with(Number, "parameters").with(Words, "architecture")
	for _, m := range c.Models {
		t.add(m.Name, ledger.Count(m.Parameters), m.Architecture)
	}
	return &Page{Title: "Models", Sections: []Section{{t}}, Document: c}
}

// rate is a cell for a figure that may be unknown.
func rate(n float64) any {
	if n == 0 {
		return "?"
	}
	return n
}
