package job

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/base/ledger"
)

// FactorsSchema is the schema of the JSON document.
const FactorsSchema = "plimsoll.factors/1"

// Factors are what a recorded run has taught about a machine and its programs. A plan takes the constants from it; the
// ratios are for the reader.
type Factors struct {
	Schema    string     `json:"schema"`
	Recording string     `json:"recording"` // the file that they come from
	Plan      string     `json:"plan"`      // that it was compared with
	Torch     string     `json:"torch"`     // the version in that plan
	GPU       string     `json:"gpu"`       // empty for the CPU
	Ranks     int        `json:"ranks"`
	Constants []Constant `json:"constants"`
	Ratios    []Ratio    `json:"ratios"`
}

// Constant is memory that does not depend on the model.
type Constant struct {
	Component ledger.Component `json:"component"`
	Bytes     ledger.Bytes     `json:"bytes"` // of one rank
	Why       string           `json:"why"`
}

// Ratio is measured bytes over planned ones, at the highest peak of a device.
type Ratio struct {
	Device    ledger.Kind      `json:"device"`
	Phase     ledger.PhaseName `json:"phase"`
	Iteration ledger.Iteration `json:"iteration,omitempty"`
	Component ledger.Component `json:"component"`
	Planned   ledger.Bytes     `json:"planned_bytes"`
	Measured  ledger.Bytes     `json:"measured_bytes"`
	Ratio     float64          `json:"ratio"`
}

// learned are the components that a plan takes from factors.
var learned = []ledger.Component{ledger.PythonProcess, ledger.OutsideAllocator}

// Document limits of factors.
const (
	maxFactors  = 1 << 20
	maxConstant = ledger.TiB
)

// readFactors reads the document of compare --learn.
func (in *Inputs) readFactors() error {
	name := in.request.Factors
	if name == "" {
		return nil
	}
	text, err := files.Read(name, maxFactors)
	if err != nil {
		var path *fs.PathError
		if errors.As(err, &path) {
			err = path.Err
		}
		return &fault.Input{Where: fault.Position{File: name}, Err: err,
			Hint: "write it with plimsoll compare PLAN RECORDING --learn " + name}
	}
	in.factors, err = parseFactors(name, text)
	return err
}

func parseFactors(name string, text []byte) (*Factors, error) {
	where := fault.Position{File: name}
	const again = "write it with plimsoll compare PLAN RECORDING --learn FILE"
	f := &Factors{}
	decoder := json.NewDecoder(bytes.NewReader(text))
	var wrong *json.SyntaxError
	switch err := decoder.Decode(f); {
	case errors.As(err, &wrong):
		return nil, &fault.Input{Where: fault.At(name, text, wrong.Offset-1), What: "this is not JSON", Err: err,
			Hint: again}
	case err != nil:
		return nil, &fault.Input{Where: where, What: "these are no factors", Err: err, Hint: again}
	case f.Schema != FactorsSchema:
		return nil, where.Inputf("the schema is %q, but this version reads %q", f.Schema, FactorsSchema).WithHint(again)
	}
	for _, c := range f.Constants {
		if !slices.Contains(learned, c.Component) {
			return nil, where.Inputf("%q is no component that a plan takes from factors", c.Component).WithHint(again)
		}
		if c.Bytes < 0 || c.Bytes > maxConstant {
			return nil, where.Inputf("%s has %d bytes: expected 0 to %d", c.Component, c.Bytes, maxConstant).
				WithHint(again)
		}
	}
	return f, nil
}

// learn takes the constants that are of this job's programs and machine, and lists every one that the plan uses.
func (r *resolver) learn() error {
	f := r.Inputs.factors
	if f == nil {
		return nil
	}
	j := r.job
	kind := j.GPU.Name
	if j.OnCPU {
		kind = ""
	}
	refused := ""
	switch {
	case f.Torch != j.Versions.Torch.String():
		refused = fmt.Sprintf("they are of torch %s, and the job has torch %v", f.Torch, j.Versions.Torch)
	case f.GPU != kind:
		refused = fmt.Sprintf("they are of %s, and the job has %s", deviceName(f.GPU), deviceName(kind))
	}
	if refused != "" {
		r.assume("the factors of %s are not used: %s", r.Factors, refused)
		return nil
	}
	for _, c := range f.Constants {
		if c.Component == ledger.OutsideAllocator && f.Ranks != j.World {
			r.assume("the factor %s of %s is not used: it is of %d ranks, and the job has %d", c.Component, r.Factors,
				f.Ranks, j.World)
			continue
		}
		if j.Learned == nil {
			j.Learned = map[ledger.Component]ledger.Holding{}
		}
		j.Learned[c.Component] = ledger.Holding{Component: c.Component, Bytes: c.Bytes,
			Why: fmt.Sprintf("learned from %s (%s): %s", f.Recording, r.Factors, c.Why)}
		r.assume("%s is %v: learned from %s (%s)", c.Component.Title(), c.Bytes, f.Recording, r.Factors)
	}
	return nil
}

func deviceName(gpu string) string {
	if gpu == "" {
		return "the CPU"
	}
	return gpu
}
