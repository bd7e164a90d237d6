//go:build linux

package protocol

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"plimsoll/internal/state/optim"
	"plimsoll/internal/state/optim/kernel"
)

// OpenSchema is the schema of [Document].
const OpenSchema = "plimsoll.open/1"

// Document describes the shard that a session holds. Clients send it with open.
type Document struct {
	Schema string `json:"schema"`
	Owner
	Optimizer  string  `json:"optimizer"`
	State      string  `json:"state"`
	Moments    string  `json:"moments"`
	Parameter  string  `json:"parameter"`
	Gradient   string  `json:"gradient"`
	Groups     int     `json:"groups"`
	Parameters []Piece `json:"parameters"`
	// Retracts asks for a log with which steps can be retracted. A session that is there may have one or not.
	Retracts bool `json:"retracts,omitempty"`
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
	MaximumGroups   = (MaximumPacket - 256) / sizeOfGroup
)

func (d *Document) Validate() error {
	switch {
	case d.Schema != OpenSchema:
		return fmt.Errorf("schema is %q: expected %q", d.Schema, OpenSchema)
	case d.Owner.validate() != nil:
		return d.Owner.validate()
	case d.Groups < 1 || d.Groups > MaximumGroups:
		return fmt.Errorf("groups is %d: expected 1 to %d", d.Groups, MaximumGroups)
	case len(d.Parameters) == 0:
		return errors.New("there are no parameters")
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
		err = cmp.Or(err, format.Validate(), d.mayRetract(format))
	}
	return err
}

// mayRetract refuses a log for a format whose steps cannot be retracted.
func (d *Document) mayRetract(f kernel.Format) error {
	if !d.Retracts || f.Retractable() == nil {
		return nil
	}
	return fmt.Errorf("retracts is true, but steps of this session cannot be retracted: %w", f.Retractable())
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

// Difference returns the first difference to the document of an earlier session that matters, or nil.
func (d *Document) Difference(was AnyDocument) error {
	other, isShard := was.(*Document)
	if !isShard {
		return errors.New("it is a shard that the service updates, and was states that the trainer updates")
	}
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
