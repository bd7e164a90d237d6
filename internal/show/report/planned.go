package report

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"strings"

	"plimsoll/internal/after/reconcile"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/plan"
)

// The largest files to read. A plan of thousands of devices has a few MB. Of the files that a plan is made from, the
// largest index of a model has 8 MB.
const (
	maxPlan  = 64 << 20
	maxInput = 100_000_000
)

// ReadPlan reads a document of plan --out. Every error is a *fault.Input.
func ReadPlan(file string) (*PlanDocument, error) {
	text, err := files.Read(file, maxPlan)
	if err != nil {
		return nil, &fault.Input{Where: fault.Position{File: file}, Err: cause(err),
			Hint: "write it with plimsoll plan --out " + file}
	}
	return ParsePlan(file, text)
}

// ParsePlan reads a plan that is no file of its own. The name is for errors, which are *fault.Input.
func ParsePlan(file string, text []byte) (*PlanDocument, error) {
	where := fault.Position{File: file}
	const again = "plan the job again with plimsoll plan --out"
	var head struct{ Schema string }
	var wrong *json.SyntaxError
	switch err := json.Unmarshal(text, &head); {
	case errors.As(err, &wrong):
		return nil, &fault.Input{Where: fault.At(file, text, wrong.Offset-1), What: "this is not JSON", Err: err,
			Hint: again}
	case err != nil || head.Schema == "":
		return nil, where.Inputf("this is no plan: it names no schema").WithHint(again)
	case head.Schema != PlanSchema:
		return nil, where.Inputf("the schema is %q, but this version reads %q", head.Schema, PlanSchema).WithHint(again)
	}
	d := &PlanDocument{}
	if err := json.Unmarshal(text, d); err != nil {
		return nil, &fault.Input{Where: where, What: "the plan is incomplete", Err: err, Hint: again}
	}
	known := d.Verdict == plan.Unknown || d.Limit != nil &&
		(d.Verdict == plan.Fits || d.Verdict == plan.Tight || d.Verdict == plan.DoesNotFit)
	if !known || len(d.Devices) == 0 {
		return nil, where.Inputf("the plan is incomplete: the verdict is %q, without a limit or devices", d.Verdict).
			WithHint(again)
	}
	return d, nil
}

const recordOne = "give a recording that plimsoll run --record has written"

// ReadRecording reads a recording of run --record or watch --record. Every error is a *fault.Input.
func ReadRecording(file string) (*reconcile.Recording, error) {
	r, err := reconcile.Open(file)
	var input *fault.Input
	if err != nil && !errors.As(err, &input) {
		return nil, &fault.Input{Where: fault.Position{File: file}, Err: cause(err), Hint: recordOne}
	}
	if input != nil && input.Hint == "" {
		input.Hint = recordOne
	}
	return r, err
}

// IsFile reports whether a file is a regular one: a recording may also go to a pipe.
func IsFile(file string) bool {
	opened, _, err := files.Open(file)
	if err == nil {
		opened.Close()
	}
	return err == nil
}

// IsRecording reports whether a file is not a plan: a plan is one document, and names its schema. Files that cannot be
// read count as recordings.
func IsRecording(file string) bool {
	opened, _, err := files.Open(file)
	if err != nil {
		return true
	}
	defer opened.Close()
	head := make([]byte, 4<<10)
	n, _ := io.ReadFull(opened, head)
	return !bytes.Contains(head[:n], []byte(`"plimsoll.plan/`))
}

// PlannedRun is the plan of a job that plimsoll run starts.
type PlannedRun struct {
	Input
	Model   string      `json:"model"`
	Verdict plan.Result `json:"verdict"`
	Text    string      `json:"text"` // the verdict in words
	// Devices are those of the plan, for the recording of the job.
	Devices []ledger.Device `json:"-"`
}

// NewPlannedRun reads the plan of a job to run. It refuses a plan whose input files have changed.
func NewPlannedRun(file string) (*PlannedRun, error) {
	d, err := ReadPlan(file)
	if err != nil {
		return nil, err
	}
	if err := d.current(file); err != nil {
		return nil, err
	}
	sum, err := hashOf(file)
	return &PlannedRun{Input{file, sum}, d.Model.Name, d.Verdict, d.verdictLine(), d.Devices}, err
}

func (d *PlanDocument) current(file string) error {
	for _, input := range d.Inputs {
		now, err := hashOf(input.File)
		if err == nil && now == input.SHA256 {
			continue
		}
		e := fault.File(file).Inputf("%s has changed since the plan was made", input.File).
			WithHint("plan the job again, or restore the file")
		if err != nil {
			e.What, e.Err, e.Hint = "a file that the plan was made from cannot be read", err,
				"run from the folder that the plan was made in, or plan the job again"
		}
		return e
	}
	return nil
}

// hashOf returns the hash of a file. Only a file of weights may be larger than a document.
func hashOf(file string) (string, error) {
	sum := sha256.New()
	opened, info, err := files.Open(file)
	if err == nil {
		defer opened.Close()
		if info.Size() > maxInput && !strings.HasSuffix(file, ".safetensors") {
			err = &files.TooLarge{Limit: maxInput}
		} else {
			_, err = io.Copy(sum, opened)
		}
	}
	if err != nil {
		return "", &fault.Input{Where: fault.Position{File: file}, Err: cause(err)}
	}
	return hex.EncodeToString(sum.Sum(nil)), nil
}

// cause returns the error without the name of the file, which the message already has.
func cause(err error) error {
	var path *fs.PathError
	if errors.As(err, &path) {
		return path.Err
	}
	return err
}
