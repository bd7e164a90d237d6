package main

import (
	"bytes"
	_ "embed"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/steptime"
)

// row is a training run that somebody measured and published: the jobs that plan reads, and what each was measured to
// hold. It was written by hand from its source.
type row struct {
	ID, Source string
	Host       bool // the run is about memory of the host
	// Reason says why the run is no job. Such a run has no variants.
	Reason   string
	variants []variant
}

// variant is a job as plan reads it: the flags of its command line and the files that they name. A benchmark of a
// module by itself has a kernel in their place.
type variant struct {
	Plan    []string
	Files   map[string]json.RawMessage // an object, or the text of a file as a string
	Kernel  *kernel
	Figures []figure
}

// figure is one measured quantity of a run, and the moment that it is of.
type figure struct {
	Quantity, Point string
	Value           float64
	Unit            string
	// Rounding is how far the source rounded the value; 0 for half of its last digit.
	Rounding float64
	// Phase and Iteration are empty for all of them.
	Phase     ledger.PhaseName
	Iteration ledger.Iteration
	// From is the phase that a host's used memory is compared from. At its end Base bytes of the host were in use.
	From ledger.PhaseName
	Base float64
	// Of is what the figure counts: the "context" of CUDA, or a "layer" between the passes; empty for all memory.
	Of          string
	AllGPUs     bool // the sum over all GPUs
	OutOfMemory bool // the run ended for lack of memory
	Main        bool // the figure by which the run is known, if that is not its peak
}

//go:embed memory.jsonl
var memoryRows []byte

// readRows reads rows. A line has one variant; lines with the name of the line before have further variants of its run.
func readRows(text []byte) (rows []row, _ error) {
	for i, line := range bytes.Split(bytes.TrimSpace(text), []byte("\n")) {
		d := json.NewDecoder(bytes.NewReader(line))
		d.DisallowUnknownFields()
		var r struct {
			row
			variant
		}
		if err := d.Decode(&r); err != nil {
			return nil, fmt.Errorf("memory.jsonl:%d: %w", i+1, err)
		}
		if n := len(rows); n == 0 || rows[n-1].ID != r.ID {
			rows = append(rows, r.row)
		}
		if last := &rows[len(rows)-1]; r.Reason == "" {
			last.variants = append(last.variants, r.variant)
		}
	}
	return rows, nil
}

// request writes the files into a folder, and reads the flags as "plimsoll plan" does.
func (r *variant) request(folder string) (q job.Request, m steptime.Machine, err error) {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return q, m, err
	}
	arguments := slices.Clone(r.Plan)
	for name, content := range r.Files {
		path := filepath.Join(folder, name)
		if err := writeInput(path, content); err != nil {
			return q, m, err
		}
		for i, a := range arguments {
			if a == name {
				arguments[i] = path
			}
		}
	}
	return q, m, argumentsOf(&q, &m).Parse(arguments)
}

// writeInput writes a file of a row. Of safetensors a row has the header; the data is a hole.
func writeInput(path string, content json.RawMessage) error {
	if strings.HasSuffix(path, ".safetensors") {
		return writeHeader(path, content)
	}
	var text string
	if json.Unmarshal(content, &text) != nil {
		text = string(content)
	}
	return os.WriteFile(path, []byte(text), 0o644)
}

func writeHeader(path string, header json.RawMessage) error {
	var tensors map[string]struct {
		Offsets [2]int64 `json:"data_offsets"`
	}
	if err := json.Unmarshal(header, &tensors); err != nil {
		return err
	}
	end := int64(0)
	for _, t := range tensors {
		end = max(end, t.Offsets[1])
	}
	content := append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header...)
	if err := os.WriteFile(path, content, 0o644); err != nil {
		return err
	}
	return os.Truncate(path, int64(len(content))+end)
}

// units are the units of figures, in bytes.
var units = map[string]float64{"TB": 1e12, "GiB": 1 << 30, "GB": 1e9, "MiB": 1 << 20, "MB": 1e6, "bytes": 1}

// perParameter is the unit of a byte for every parameter of the model.
const perParameter = "bytes/param"

// bytes returns a value of the figure's unit in bytes. elements is the number of parameters of the model.
func (f figure) bytes(value float64, elements int64) float64 {
	if f.Unit == perParameter {
		return value * float64(elements)
	}
	return value * units[f.Unit]
}
