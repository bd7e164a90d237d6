package report

import (
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/checkpoint"
)

// statesCheckpointSchema is the schema of the JSON document of a checkpoint of states.
const statesCheckpointSchema = "plimsoll.states-checkpoint/1"

// statesCheckpoint is the document of a checkpoint of states.
type statesCheckpoint struct {
	Schema  string       `json:"schema"`
	Version string       `json:"version"`
	Path    string       `json:"path"`
	Step    int64        `json:"step"`
	Ranks   int          `json:"ranks"`
	Bytes   ledger.Bytes `json:"bytes"` // of all files
	Files   []statesFile `json:"files"`
}

// statesFile is a file that one rank has written.
type statesFile struct {
	Name    string         `json:"file"`
	Rank    int            `json:"rank"`
	Part    string         `json:"part"`
	Bytes   ledger.Bytes   `json:"bytes"`
	Tensors []statesTensor `json:"tensors"`
}

// statesTensor is a tensor of a file.
type statesTensor struct {
	Name  string       `json:"name"`
	Type  string       `json:"dtype"`
	Shape []int64      `json:"shape"`
	Bytes ledger.Bytes `json:"bytes"`
}

func newStatesCheckpoint(version string, c *checkpoint.States) *statesCheckpoint {
	d := &statesCheckpoint{Schema: statesCheckpointSchema, Version: version, Path: c.Path(), Step: c.Step(),
		Ranks: c.World()}
	for _, f := range c.Files() {
		file := statesFile{Name: f.Name, Rank: f.Rank, Part: f.Part, Bytes: f.Bytes}
		for _, t := range f.Tensors {
			file.Tensors = append(file.Tensors, statesTensor{t.Name, t.Type.String(), t.Shape, t.Bytes})
		}
		d.Files = append(d.Files, file)
		d.Bytes += f.Bytes
	}
	return d
}

// Page shows the files of the ranks and all tensors.
func (d *statesCheckpoint) Page() *Page {
	var facts Facts
	facts.add("checkpoint", "%s", d.Path)
	facts.add("step", "%d", d.Step)
	facts.add("holds", "states of an optimizer that updates them on its device")
	facts.add("files", "%v of %d ranks", d.Bytes, d.Ranks)
	files := new(Table).with(Words, "file").with(Number, "tensors").with(Bytes, "bytes")
	tensors := new(Table).with(Number, "rank").with(Words, "tensor", "shape", "dtype").with(Bytes, "bytes")
	for _, f := range d.Files {
		files.add(f.Name, len(f.Tensors), f.Bytes)
		for _, t := range f.Tensors {
			tensors.add(f.Rank, t.Name, shapeText(t.Shape), t.Type, t.Bytes)
		}
	}
	return &Page{Title: "Checkpoint " + d.Path, Sections: []Section{{facts}, {files}, {tensors}}, Document: d}
}

// Verified reports that every byte is as it was written.
func (d *statesCheckpoint) Verified() *Page { return verified(d.Path, d.Step, len(d.Files), d.Bytes) }
