package report

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"github.com/jedib0t/go-pretty/v6/table"

	"plimsoll/checkpoint"
	"plimsoll/ledger"
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

// WriteJSON writes the document.
func (d *Checkpoint) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(d)
}

// WriteText writes the document for people.
func (d *Checkpoint) WriteText(w io.Writer) error {
	var out strings.Builder
	line := func(name, value string) { fmt.Fprintf(&out, "%-18s %s\n", name, value) }
	line("checkpoint", d.Path)
	line("step", fmt.Sprint(d.Step))
	line("optimizer", d.Algorithm)
	line("parameters", fmt.Sprintf("%s in %d tensors", ledger.Count(d.Elements), len(d.Parameters)))
	line("files", fmt.Sprintf("%v of %d ranks", d.Bytes, d.Ranks))
	out.WriteString("\n" + d.files() + "\n\n" + d.parameters() + "\n")
	_, err := io.WriteString(w, out.String())
	return err
}

// WriteVerified reports that every byte is as it was written.
func (d *Checkpoint) WriteVerified(w io.Writer) error {
	_, err := fmt.Fprintf(w, "%s: step %d, %d files, %v: every byte is as it was written\n", d.Path, d.Step,
		len(d.Files), d.Bytes)
	return err
}

func (d *Checkpoint) files() string {
	t := newTable(4, "file", "state", "moments", "trainer", "parameters", "bytes")
	for _, f := range d.Files {
		t.AppendRow(table.Row{f.Name, f.State, f.Moments, f.Parameter, ledger.Count(f.Parameters), f.Bytes})
	}
	return t.Render()
}

func (d *Checkpoint) parameters() string {
	t := newTable(4, "parameter", "shape", "state", "moments", "group", "bytes", "ranks")
	for _, p := range d.Parameters {
		t.AppendRow(table.Row{p.Name, shapeText(p.Shape), p.State, p.Moments, p.Group, p.Bytes, p.Ranks})
	}
	return t.Render()
}

// shapeText returns a shape as "151936 x 896", and "" for a scalar.
func shapeText(shape []int64) string {
	var parts []string
	for _, n := range shape {
		parts = append(parts, fmt.Sprint(n))
	}
	return strings.Join(parts, " x ")
}
