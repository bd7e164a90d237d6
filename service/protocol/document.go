package protocol

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"
	"slices"

	"github.com/go-json-experiment/json"

	"plimsoll/optim"
	"plimsoll/optim/kernel"
)

// OpenSchema is the schema of [Document].
const OpenSchema = "plimsoll.open/1"

// Document describes the shard that a session holds. Clients send it with open.
type Document struct {
	Schema     string  `json:"schema"`
	Job        string  `json:"job"`
	Rank       int     `json:"rank"`
	World      int     `json:"world"`
	LocalWorld int     `json:"local_world"`
	Part       string  `json:"part"`
	Instance   int     `json:"instance,omitempty"`
	Optimizer  string  `json:"optimizer"`
	State      string  `json:"state"`
	Moments    string  `json:"moments"`
	Parameter  string  `json:"parameter"`
	Gradient   string  `json:"gradient"`
	Groups     int     `json:"groups"`
	Parameters []Piece `json:"parameters"`
	CPUs       []int   `json:"cpus,omitempty"`
}

// Piece is a range of a parameter that a shard holds: Count elements of the flattened
// parameter from First on.
type Piece struct {
	Name    string  `json:"name"`
	Shape   []int64 `json:"shape"`
	Group   int     `json:"group"`
	Moments string  `json:"moments,omitempty"` // if empty, those of the shard
	First   int64   `json:"first"`
	Count   int64   `json:"count"`
}

// Limits keep sums of sizes within 64 bits, and numbers of workers within reason.
const (
	maximumElements = 1 << 48
	maximumRanks    = 1 << 20
	MaximumLocal    = 1 << 10 // ranks of a host
	MaximumGroups   = (MaximumPacket - 256) / sizeOfGroup
	MaximumCPUs     = 1 << 13
	maximumInstance = 1 << 31
)

// SafeName matches names that are safe in names of files and arenas.
var SafeName = regexp.MustCompile(`^[a-zA-Z0-9_-][a-zA-Z0-9._-]{0,63}$`)

// MaximumDocument is the largest size of a document of open: some hundred thousand
// parameters.
const MaximumDocument = 256 << 20

// CheckDocumentLength refuses documents that are too long. Both open and restore call it.
func CheckDocumentLength(document uint64) error {
	if document == 0 || document > MaximumDocument {
		return fmt.Errorf("a document of %d bytes: expected 1 to %d", document, MaximumDocument)
	}
	return nil
}

// ParseDocument reads a document and checks it.
func ParseDocument(text []byte) (*Document, error) {
	d := &Document{}
	if err := json.Unmarshal(text, d, json.RejectUnknownMembers(true)); err != nil {
		return nil, Refused.Errorf("open: the document cannot be read: %v", err)
	}
	if err := d.Validate(); err != nil {
		return nil, Refused.Errorf("open: %v", err)
	}
	return d, nil
}

func (d *Document) Validate() error {
	switch {
	case d.Schema != OpenSchema:
		return fmt.Errorf("schema is %q: expected %q", d.Schema, OpenSchema)
	case !SafeName.MatchString(d.Job):
		return fmt.Errorf("job is %q: expected 1 to 64 of a-z A-Z 0-9 . _ -, and no dot at the beginning", d.Job)
	case !SafeName.MatchString(d.Part):
		return fmt.Errorf("part is %q: expected 1 to 64 of a-z A-Z 0-9 . _ -, and no dot at the beginning", d.Part)
	case d.Instance < 0 || d.Instance > maximumInstance:
		return fmt.Errorf("instance is %d: expected 0 to %d", d.Instance, maximumInstance)
	case d.World < 1 || d.World > maximumRanks:
		return fmt.Errorf("world is %d: expected 1 to %d", d.World, maximumRanks)
	case d.Rank < 0 || d.Rank >= d.World:
		return fmt.Errorf("rank is %d of %d: expected 0 to %d", d.Rank, d.World, d.World-1)
	case d.LocalWorld < 1 || d.LocalWorld > min(d.World, MaximumLocal):
		return fmt.Errorf("local_world is %d of %d ranks: expected 1 to %d", d.LocalWorld, d.World,
			min(d.World, MaximumLocal))
	case d.Groups < 1 || d.Groups > MaximumGroups:
		return fmt.Errorf("groups is %d: expected 1 to %d", d.Groups, MaximumGroups)
	case len(d.Parameters) == 0:
		return errors.New("there are no parameters")
	case len(d.CPUs) > MaximumCPUs ||
		slices.ContainsFunc(d.CPUs, func(cpu int) bool { return cpu < 0 || cpu >= MaximumCPUs }):
		return fmt.Errorf("cpus: expected at most %d CPUs, each from 0 to %d", MaximumCPUs, MaximumCPUs-1)
	}
	names := make(map[string]bool, len(d.Parameters))
	total := int64(0)
	for _, p := range d.Parameters {
		if err := p.validate(d); err != nil {
			return err
		}
		if names[p.Name] {
			return fmt.Errorf("parameter %s is listed twice: a shard has one range of a parameter", p.Name)
		}
		names[p.Name] = true
		if total += p.Count; total > maximumElements {
			return fmt.Errorf("more than %d elements", int64(maximumElements))
		}
	}
	format, err := d.Format()
	for _, p := range d.Parameters {
		format.Moments = d.MomentsOf(p)
		err = cmp.Or(err, format.Validate())
	}
	return err
}

func (p Piece) validate(d *Document) error {
	if p.Name == "" || len(p.Name) > 1024 {
		return fmt.Errorf("the name of a parameter has %d bytes: expected 1 to 1024", len(p.Name))
	}
	elements := int64(1)
	for _, n := range p.Shape {
		if n < 1 || n > maximumElements || elements > maximumElements/n {
			return fmt.Errorf("parameter %s has the shape %v: expected at most %d elements, and none of 0", p.Name,
				p.Shape, int64(maximumElements))
		}
		elements *= n
	}
	switch {
	case p.First < 0 || p.Count < 1 || p.First > elements-p.Count:
		return fmt.Errorf("parameter %s: %d elements from %d on: expected a range within its %d",
			p.Name, p.Count, p.First, elements)
	case p.Group < 0 || p.Group >= d.Groups:
		return fmt.Errorf("parameter %s is in group %d: expected 0 to %d", p.Name, p.Group, d.Groups-1)
	}
	if _, err := kernel.ParseMoments(p.Moments); err != nil && p.Moments != "" {
		return fmt.Errorf("parameter %s: moments are %w", p.Name, err)
	}
	return nil
}

// Format returns the format in which the shard is held.
func (d *Document) Format() (kernel.Format, error) {
	rule, badOptimizer := optim.ParseRule(d.Optimizer)
	state, badState := kernel.ParseState(d.State)
	moments, badMoments := kernel.ParseMoments(d.Moments)
	parameter, badParameter := kernel.ParseNumberType(d.Parameter)
	gradient, badGradient := kernel.ParseNumberType(d.Gradient)
	for _, field := range []struct {
		name string
		err  error
	}{
		{"optimizer", badOptimizer}, {"state", badState}, {"moments", badMoments}, {"parameter", badParameter},
		{"gradient", badGradient},
	} {
		if field.err != nil {
			return kernel.Format{}, fmt.Errorf("%s is %w", field.name, field.err)
		}
	}
	f := kernel.Format{
		Algorithm: rule.Algorithm(), State: state, Moments: moments, Parameter: parameter, Gradient: gradient,
	}
	return f, f.Validate()
}

// MomentsOf returns the type in which the moments of a piece are held.
func (d *Document) MomentsOf(p Piece) kernel.MomentType {
	name := p.Moments
	if name == "" {
		name = d.Moments
	}
	moments, _ := kernel.ParseMoments(name) // was validated
	return moments
}

// SessionPart names the part of a session. Optimizers of one program may each have a
// part of the same name; the instance tells their sessions apart.
func (d *Document) SessionPart() string {
	if d.Instance == 0 {
		return d.Part
	}
	return fmt.Sprintf("%s@%d", d.Part, d.Instance)
}

// Difference returns the first difference between two documents that matters, or nil.
func (d *Document) Difference(other *Document) error {
	for i := range d.Parameters {
		if i < len(other.Parameters) && !d.Parameters[i].equal(other.Parameters[i]) {
			return fmt.Errorf("parameter %d is %v, and was %v", i, d.Parameters[i], other.Parameters[i])
		}
	}
	for _, field := range []struct {
		name     string
		now, was any
	}{
		{"the number of parameters", len(d.Parameters), len(other.Parameters)},
		{"world", d.World, other.World},
		{"optimizer", d.Optimizer, other.Optimizer},
		{"state", d.State, other.State},
		{"moments", d.Moments, other.Moments},
		{"parameter", d.Parameter, other.Parameter},
		{"gradient", d.Gradient, other.Gradient},
		{"groups", d.Groups, other.Groups},
	} {
		if field.now != field.was {
			return fmt.Errorf("%s is %v, and was %v", field.name, field.now, field.was)
		}
	}
	return nil
}

func (p Piece) equal(other Piece) bool {
	return p.Name == other.Name && slices.Equal(p.Shape, other.Shape) && p.Group == other.Group &&
		p.Moments == other.Moments && p.First == other.First && p.Count == other.Count
}
