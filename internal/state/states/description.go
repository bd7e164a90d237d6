// Package states is where the states of an optimizer rest in host memory between two steps, if the update itself
// runs on a GPU. The trainer copies them chunk by chunk into a window of the GPU and back. A process may end at any
// instant: every chunk is then whole, of the step before or of the new one, without a second copy of the states.
//
// The states of a chunk are one region. The arena has room for all regions and for one more, the gap. A step moves
// every region by the gap: from "high" to "low" in ascending order of the chunks, and from "low" to "high" in
// descending order. So a region only overwrites what the chunks before it have left, and never its own old region.
// The position in the control arena says how many regions are new. It is written behind each region.
//
// docs/protocol.md has the control arena byte by byte. The Python client has the same arithmetic.
package states

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"unicode/utf8"

	"plimsoll/internal/base/dtype"
)

// Alignment is that of regions, and of tensors in them.
const Alignment = 256

// Description says what a rank's states consist of. It is a part of the document of hold.
type Description struct {
	// Recovery says that parameters and gradients are held, too, so that another process can finish a step.
	Recovery      bool    `json:"recovery"`
	GradientBytes int64   `json:"gradient_bytes"`
	SettingsBytes int64   `json:"settings_bytes"` // room for the hyperparameters of a step
	Chunks        []Chunk `json:"chunks"`
}

// Chunk is what a step copies and updates at a time.
type Chunk struct {
	Bytes   int64    `json:"bytes"` // of its region
	Tensors []Tensor `json:"tensors"`
	Scalars []Scalar `json:"scalars,omitempty"`
}

// Tensor is a tensor of the state.
type Tensor struct {
	Name   string     `json:"name"` // of the parameter
	Key    string     `json:"key"`  // such as exp_avg
	Type   dtype.Type `json:"dtype"`
	Shape  []int64    `json:"shape"`
	Offset int64      `json:"offset"` // in the region
}

// Scalar is a number of the state, such as the step count of a parameter. Scalars are in two tables of the control
// arena, in the order of the description.
type Scalar struct {
	Name string     `json:"name"`
	Key  string     `json:"key"`
	Type dtype.Type `json:"dtype"`
}

// Title names a tensor as checkpoints do.
func (t Tensor) Title() string { return t.Name + "." + t.Key }

// Title names a scalar as checkpoints do.
func (s Scalar) Title() string { return s.Name + "." + s.Key }

// Bytes returns the size of a tensor.
func (t Tensor) Bytes() int64 {
	bytes := t.Type.Size()
	for _, n := range t.Shape {
		bytes *= n
	}
	return bytes
}

// Limits keep sums of sizes within 64 bits.
const (
	MaximumBytes    = 1 << 48 // of all states, and elements of a tensor
	maximumChunks   = 1 << 20
	maximumSettings = 16 << 20
	maximumName     = 1024
)

// Validate reports what is wrong with a description.
func (d *Description) Validate() error {
	switch {
	case len(d.Chunks) == 0:
		return errors.New("there are no chunks")
	case len(d.Chunks) > maximumChunks:
		return fmt.Errorf("there are %d chunks: expected at most %d", len(d.Chunks), maximumChunks)
	case d.SettingsBytes < 0 || d.SettingsBytes > maximumSettings:
		return fmt.Errorf("settings_bytes is %d: expected 0 to %d", d.SettingsBytes, maximumSettings)
	case d.GradientBytes < 0 || d.GradientBytes > MaximumBytes:
		return fmt.Errorf("gradient_bytes is %d: expected 0 to %d", d.GradientBytes, int64(MaximumBytes))
	case d.Recovery != (d.GradientBytes > 0):
		return fmt.Errorf("recovery is %t and gradient_bytes is %d: expected gradients with recovery, and none without",
			d.Recovery, d.GradientBytes)
	}
	names, total := map[string]bool{}, int64(0)
	for i, c := range d.Chunks {
		if err := c.validate(names); err != nil {
			return fmt.Errorf("chunk %d: %w", i, err)
		}
		if total += c.Bytes; total > MaximumBytes {
			return fmt.Errorf("the chunks have more than %d bytes", int64(MaximumBytes))
		}
	}
	if total == 0 {
		return errors.New("the chunks have no bytes")
	}
	return nil
}

// validate also refuses names that other chunks have.
func (c Chunk) validate(names map[string]bool) error {
	if c.Bytes < 0 || c.Bytes > MaximumBytes || c.Bytes%Alignment != 0 {
		return fmt.Errorf("bytes is %d: expected a multiple of %d, from 0 to %d", c.Bytes, Alignment,
			int64(MaximumBytes))
	}
	end := int64(0)
	for _, t := range c.Tensors {
		if err := cmp.Or(checkName(t.Name, t.Key, names), CheckTensor(t.Title(), t.Type, t.Shape)); err != nil {
			return err
		}
		if t.Offset < end || t.Offset%Alignment != 0 || t.Bytes() > c.Bytes-t.Offset {
			return fmt.Errorf("tensor %s: %d bytes at offset %d: expected a multiple of %d from %d on, so that the "+
				"tensor ends within the region of %d bytes", t.Title(), t.Bytes(), t.Offset, Alignment, end, c.Bytes)
		}
		end = t.Offset + t.Bytes()
	}
	for _, s := range c.Scalars {
		if err := cmp.Or(checkName(s.Name, s.Key, names), checkType(s.Title(), s.Type)); err != nil {
			return err
		}
	}
	return nil
}

// CheckTensor refuses a type or a shape that no tensor of states has.
func CheckTensor(title string, of dtype.Type, shape []int64) error {
	if err := checkType(title, of); err != nil {
		return err
	}
	left := int64(MaximumBytes)
	for _, n := range shape {
		if n < 0 || n > left {
			return fmt.Errorf("tensor %s has the shape %v: expected at most %d elements", title, shape,
				int64(MaximumBytes))
		}
		left /= max(1, n)
	}
	return nil
}

func checkType(title string, t dtype.Type) error {
	if t == dtype.Invalid {
		return fmt.Errorf("%s has no dtype: expected one such as %q", title, dtype.F32)
	}
	return nil
}

func checkName(name, key string, names map[string]bool) error {
	for _, text := range []string{name, key} {
		if text == "" || len(text) > maximumName || !utf8.ValidString(text) {
			return fmt.Errorf("the name %.80q of a parameter or a state: expected 1 to %d bytes of UTF-8", text,
				maximumName)
		}
	}
	title := name + "." + key
	if names[title] {
		return fmt.Errorf("%s is listed twice", title)
	}
	names[title] = true
	return nil
}

// Difference returns the first difference to an earlier description, or nil.
func (d *Description) Difference(was *Description) error {
	for i, c := range d.Chunks {
		if i == len(was.Chunks) {
			break
		}
		if err := c.difference(was.Chunks[i]); err != nil {
			return fmt.Errorf("chunk %d: %w", i, err)
		}
	}
	switch {
	case len(d.Chunks) != len(was.Chunks):
		return fmt.Errorf("the number of chunks is %d, and was %d", len(d.Chunks), len(was.Chunks))
	case d.Recovery != was.Recovery:
		return fmt.Errorf("recovery is %t, and was %t", d.Recovery, was.Recovery)
	case d.GradientBytes != was.GradientBytes:
		return fmt.Errorf("gradient_bytes is %d, and was %d", d.GradientBytes, was.GradientBytes)
	case d.SettingsBytes != was.SettingsBytes:
		return fmt.Errorf("settings_bytes is %d, and was %d", d.SettingsBytes, was.SettingsBytes)
	}
	return nil
}

func (c Chunk) difference(was Chunk) error {
	for i, t := range c.Tensors {
		if i < len(was.Tensors) && !t.equal(was.Tensors[i]) {
			return fmt.Errorf("tensor %d is %v, and was %v", i, t, was.Tensors[i])
		}
	}
	for i, s := range c.Scalars {
		if i < len(was.Scalars) && s != was.Scalars[i] {
			return fmt.Errorf("scalar %d is %s of %v, and was %s of %v", i, s.Title(), s.Type, was.Scalars[i].Title(),
				was.Scalars[i].Type)
		}
	}
	switch {
	case len(c.Tensors) != len(was.Tensors):
		return fmt.Errorf("the number of tensors is %d, and was %d", len(c.Tensors), len(was.Tensors))
	case len(c.Scalars) != len(was.Scalars):
		return fmt.Errorf("the number of scalars is %d, and was %d", len(c.Scalars), len(was.Scalars))
	case c.Bytes != was.Bytes:
		return fmt.Errorf("bytes is %d, and was %d", c.Bytes, was.Bytes)
	}
	return nil
}

func (t Tensor) equal(other Tensor) bool {
	return t.Title() == other.Title() && t.Type == other.Type && slices.Equal(t.Shape, other.Shape) &&
		t.Offset == other.Offset
}

// String describes a tensor, for messages.
func (t Tensor) String() string {
	return fmt.Sprintf("%s, %v %v at %d", t.Title(), t.Type, t.Shape, t.Offset)
}
