package model

import (
	"slices"
	"strings"
)

// Tower is an encoder of images. Its outputs replace embeddings of tokens of the
// language model.
type Tower struct {
	Path      string // the module of the encoder
	Projector string // the module between it and the language model
	// Network is the encoder's own: its width and a stack of blocks.
	Network *Network
	Image   Image
	// Before are the steps from pixels to the first block, After those from the
	// last block to the embeddings of the language model.
	Before, After []Step
	// Unread is the number of last blocks that run and whose results nothing reads.
	Unread int
	// Deep are the steps after blocks whose results are added to the first blocks
	// of the language model.
	Deep []Deep
	// BlockClass is the class of the blocks. FSDP and accelerate do not wrap them on
	// their own if they are Unwrapped: _no_split_modules does not name the class.
	BlockClass string
	Unwrapped  bool
	// Hooked reports whether enable_input_require_grads finds the convolution: the
	// class says that it is the encoder's input embedding.
	Hooked bool
	// OneSequence reports whether the patches of all images are one sequence, and
	// each image or window of it attends to itself.
	OneSequence bool
	// MasksImages reports whether a mask of all pairs of patches keeps images apart.
	MasksImages bool
	// MasksText reports whether the tokens of an image attend to each other in the
	// language model, whose attention then needs a mask.
	MasksText bool
}

// Deep are the steps after a block of a tower.
type Deep struct {
	Block int // by its index
	Steps []Step
}

// Image is how an encoder cuts images into patches, and its patches into tokens.
type Image struct {
	Channels int64
	Frames   int64 // an image is repeated so often
	Patch    int64 // pixels of a patch's side
	Merged   int64 // patches of the side of a token
	Class    int64 // rows before those of the patches
	// Height and Width are those of all images, or 0 if images have sizes of their
	// own.
	Height, Width int64
	// Tokens of every image; 0 follows from the patches.
	Tokens int64
	// Most is the number of pixels of the longer side that images are scaled down
	// to; 0 is no limit.
	Most int64
}

// Patches returns the number of patches of an image.
func (i Image) Patches(height, width int64) int64 { return (height / i.Patch) * (width / i.Patch) }

// TokensOf returns the number of tokens of an image.
func (i Image) TokensOf(height, width int64) int64 {
	if i.Tokens > 0 {
		return i.Tokens
	}
	return i.Patches(height, width) / (i.Merged * i.Merged)
}

// StepKind is the kind of a step.
type StepKind int

// The kinds of steps. A row is that of a patch, and later of a token.
const (
	Convolve  StepKind = iota // a convolution of every patch: Path, Width
	Project                   // a linear module: Path, Width
	Multiply                  // a product with the parameter at Path: Width
	Normalize                 // Norm
	Activate                  // Function
	Prepend                   // a row, the parameter at Path, before those of an image
	Position                  // adds a row of the table at Path to each row
	Locate                    // the same, of a parameter that is no table
	Resample                  // adds four weighted rows of the table at Path to each row
	Merge                     // Rows rows side by side become one
	Average                   // the average of Rows rows
	Reorder                   // the rows by an index
	Copy                      // the same elements in another order
	Crop                      // drops the rows before those of the patches
)

// Step is an operation between pixels, blocks and embeddings.
type Step struct {
	Kind     StepKind
	Path     string
	Width    int64 // of a row after it
	Norm     Norm
	Function string
	Rows     int64
}

// Fit returns the size of an image of this size after the processor has scaled it: to full tokens, and down to the
// longer side that the encoder reads.
func (i Image) Fit(height, width int64) (_, _ int64) {
	side := i.Patch * i.Merged
	if longer := max(height, width); i.Most > 0 && longer > i.Most {
		height, width = max(1, height*i.Most/longer), max(1, width*i.Most/longer)
	}
	round := func(n int64) int64 {
		if i.Most > 0 {
			return (n + side - 1) / side * side
		}
		return max(1, (n+side/2)/side) * side
	}
	return round(height), round(width)
}

// Part is a part of a multimodal model.
type Part string

// The parts.
const (
	Vision    Part = "vision"    // the encoder of images
	Projector Part = "projector" // from the encoder to the language model
	Language  Part = "language"
)

// Parts are all parts.
var Parts = []Part{Vision, Projector, Language}

// PartNames returns the names of all parts.
func PartNames() []string {
	var names []string
	for _, part := range Parts {
		names = append(names, string(part))
	}
	return names
}

// PartOf returns the part of a module or a parameter.
func (n *Network) PartOf(path string) Part {
	in := func(module string) bool { return module != "" && strings.HasPrefix(path, module+".") }
	for _, t := range n.Towers {
		switch {
		case in(t.Projector):
			return Projector
		case in(t.Path):
			return Vision
		}
	}
	return Language
}

// Freeze returns the model with parts that no gradient trains.
func (m *Model) Freeze(parts map[Part]bool) *Model {
	frozen := m.Clone()
	for i := range frozen.Parameters {
		p := &frozen.Parameters[i]
		p.Frozen = p.Frozen || parts[m.Network.PartOf(p.Name)]
	}
	return frozen
}

// Clone returns the model with a list of parameters of its own.
func (m *Model) Clone() *Model {
	again := *m
	again.Parameters = slices.Clone(m.Parameters)
	return &again
}

// linears returns the paths of the linear modules of a tower.
func (t *Tower) linears() []string {
	var paths []string
	steps := func(list []Step) {
		for _, step := range list {
			if step.Kind == Project {
				paths = append(paths, step.Path)
			}
		}
	}
	steps(t.Before)
	paths = append(paths, t.Network.Linears()...)
	for _, deep := range t.Deep {
		steps(deep.Steps)
	}
	steps(t.After)
	return paths
}
