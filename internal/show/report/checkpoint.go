package report

import (
	"fmt"
	"strings"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/checkpoint"
)

// CheckpointSchema is the schema of the JSON document.
const CheckpointSchema = "plimsoll.checkpoint/1"

// Checkpoint is the document of a checkpoint.
type Checkpoint struct {
	Schema     string                `json:"schema"`
	Version    string                `json:"version"`
	Path       string                `json:"path"`
	Step       int64                 `json:"step"`
	Ranks      int                   `json:"ranks"`
	Algorithm  string                `json:"algorithm"`
	Elements   int64                 `json:"parameters"` // elements of all parameters
	Bytes      ledger.Bytes          `json:"bytes"`      // of all files
	Files      []CheckpointFile      `json:"files"`
	Parameters []CheckpointParameter `json:"tensors"`
}

// CheckpointFile is a file that one rank has written.
type CheckpointFile struct {
	Name       string       `json:"file"`
	Rank       int          `json:"rank"`
	Part       string       `json:"part"`
	State      string       `json:"state"`
	Moments    string       `json:"moments"`
	Parameter  string       `json:"parameter"` // type of the trainer's parameters
	Parameters int64        `json:"parameters"`
	Bytes      ledger.Bytes `json:"bytes"`
}

// CheckpointParameter is one parameter, summed over all files.
type CheckpointParameter struct {
	Name    string       `json:"name"`
	Shape   []int64      `json:"shape"`
	Group   int          `json:"group"`
	State   string       `json:"state"`
	Moments string       `json:"moments"`
	Bytes   ledger.Bytes `json:"bytes"` // without the headers of int8 moments, which several parameters share
	Ranks   int          `json:"ranks"` // ranks that hold a part of the parameter
}

// AnyCheckpoint is the document of a checkpoint of shards, or of states.
type AnyCheckpoint interface {
	Page() *Page
	Verified() *Page
}

// CheckpointOf makes the document of a checkpoint of either kind.
func CheckpointOf(version string, opened checkpoint.Opened) AnyCheckpoint {
	if c, ok := opened.(*checkpoint.States); ok {
		return newStatesCheckpoint(version, c)
	}
	return NewCheckpoint(version, opened.(*checkpoint.Checkpoint))
}

// NewCheckpoint makes the document of a checkpoint.
func NewCheckpoint(version string, c *checkpoint.Checkpoint) *Checkpoint {
	d := &Checkpoint{
		Schema: CheckpointSchema, Version: version,
		Path: c.Path(), Step: c.Step(), Ranks: c.World(), Algorithm: c.Algorithm().String(),
	}
	for _, f := range c.Files() {
		d.Files = append(d.Files, CheckpointFile{f.Name, f.Rank, f.Part, f.Format.State.String(),
			f.Format.Moments.String(), f.Format.Parameter.String(), f.Parameters, f.Bytes})
		d.Bytes += f.Bytes
	}
	for _, p := range c.Parameters() {
		d.Parameters = append(d.Parameters, CheckpointParameter{p.Name, p.Shape, p.Group, p.State.String(),
			p.Moments.String(), p.Bytes, p.Ranks})
		elements := int64(1)
		for _, n := range p.Shape {
			elements *= n
		}
		d.Elements += elements
	}
	return d
}

// Page shows the files of the ranks and all parameters.
func (d *Checkpoint) Page() *Page {
	var facts Facts
	facts.add("checkpoint", "%s", d.Path)
	facts.add("step", "%d", d.Step)
	facts.add("optimizer", "%s", d.Algorithm)
	facts.add("parameters", "%s in %d tensors", ledger.Count(d.Elements), len(d.Parameters))
	facts.add("files", "%v of %d ranks", d.Bytes, d.Ranks)
	return &Page{
		Title:    "Checkpoint " + d.Path,
		Sections: []Section{{facts}, {d.files()}, {d.parameters()}},
		Document: d,
	}
}

// Verified reports that every byte is as it was written.
func (d *Checkpoint) Verified() *Page { return verified(d.Path, d.Step, len(d.Files), d.Bytes) }

func verified(path string, step int64, files int, bytes ledger.Bytes) *Page {
	return Sentence(fmt.Sprintf("%s: step %d, %d files, %v: every byte is as it was written", path, step, files, bytes))
}

func (d *Checkpoint) files() *Table {
	t := new(Table).with(Words, "file", "state", "moments", "trainer").with(Number, "parameters").with(Bytes, "bytes")
	for _, f := range d.Files {
		t.add(f.Name, f.State, f.Moments, f.Parameter, ledger.Count(f.Parameters), f.Bytes)
	}
	return t
}

func (d *Checkpoint) parameters() *Table {
	t := new(Table).with(Words, "parameter", "shape", "state", "moments").with(Number, "group").with(Bytes, "bytes").
		with(Number, "ranks")
	for _, p := range d.Parameters {
		t.add(p.Name, shapeText(p.Shape), p.State, p.Moments, p.Group, p.Bytes, p.Ranks)
	}
	return t
}

// shapeText returns a shape as "151936 x 896", and "" for a scalar.
func shapeText(shape []int64) string {
	var parts []string
	for _, n := range shape {
		parts = append(parts, fmt.Sprint(n))
	}
	return strings.Join(parts, " x ")
}
