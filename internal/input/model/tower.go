package model

import (
	"math"
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
	// AnglesKept reports whether cosines and sines are a buffer of the encoder.
	AnglesKept bool
}

// Deep are the steps after a block of a tower.
type Deep struct {
	Block int // by its index
	Steps []Step
}

// Image is how an encoder cuts images into patches, and its patches into tokens.
type Image struct {
	Channels int64
	Usual    int64 // the side of images that the processor makes, if an image may have any size; 0 is unknown
	Frames   int64 // an image is repeated so often
	Patch    int64 // pixels of a patch's side
	Merged   int64 // patches of the side of a token
	Class    int64 // rows before those of the patches
	// Height and Width are those of all images, or 0 if images have sizes of their
	// own.
	Height, Width int64
	// Tokens of every image; 0 follows from the patches.
	Tokens int64
	// Kept are the rows before the patches that become tokens, too.
	Kept int64
	// Sizes are those that an image is fitted into before it is cut into tiles of
	// Height x Width. The encoder reads the tiles and the image scaled down to one.
	Sizes [][2]int64
	// MostTiles, if it is not 0, is the number of tiles that the tokens of an image
	// are scaled down to. Then only an image alone in its sequence is cut.
	MostTiles int64
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
	return i.Patches(height, width)/(i.Merged*i.Merged) + i.Kept
}

// Cut returns how many tiles and tokens one of so many images of a sequence has.
func (i Image) Cut(height, width, images int64) (tiles, tokens int64) {
	switch {
	case i.Sizes == nil:
		return 1, i.TokensOf(height, width)
	case i.MostTiles > 0 && images > 1: // with a parameter behind the only row
		return 1, i.TokensOf(i.Height, i.Width) + 1
	}
	best := i.best(height, width)
	down, across := (best[0]+i.Height-1)/i.Height, (best[1]+i.Width-1)/i.Width
	rows, columns := down*(i.Height/i.Patch), across*(i.Width/i.Patch)
	// Rows or columns of padding are taken away (unpad_image in transformers).
	round := func(x float64) int64 { return int64(math.Round(x*1e7) / 1e7) }
	if width*rows > columns*height {
		padding := (rows - round(float64(height)*float64(columns)/float64(width))) / 2
		rows -= 2 * padding
	} else {
		padding := (columns - round(float64(width)*float64(rows)/float64(height))) / 2
		columns -= 2 * padding
	}
	if i.MostTiles > 0 {
		side := i.Height / i.Patch
		if ratio := math.Sqrt(float64(rows*columns) / float64(i.MostTiles*side*side)); ratio > 1.1 {
			rows, columns = int64(float64(rows)/ratio), int64(float64(columns)/ratio)
		}
	}
	return down*across + 1, i.TokensOf(i.Height, i.Width) + rows*(columns+1)
}

// best returns the size that keeps most of an image, and of these the one with the
// least padding (select_best_resolution in transformers).
func (i Image) best(height, width int64) [2]int64 {
	best, most, least := [2]int64{i.Height, i.Width}, int64(0), int64(math.MaxInt64)
	for _, size := range i.Sizes {
		scale := min(float64(size[1])/float64(width), float64(size[0])/float64(height))
		kept := min(int64(float64(width)*scale)*int64(float64(height)*scale), height*width)
		if padding := size[0]*size[1] - kept; kept > most || kept == most && padding < least {
			best, most, least = size, kept, padding
		}
	}
	return best
}

// StepKind is the kind of a step.
type StepKind int

// The kinds of steps. A row is that of a patch, and later of a token.
const (
	Convolve    StepKind = iota // a convolution of every patch: Path, Width
	Project                     // a linear module: Path, Width
	Multiply                    // a product with the parameter at Path: Width
	Normalize                   // Norm
	Activate                    // Function
	Prepend                     // a row, the parameter at Path, before those of an image; and one at Second
	Position                    // adds a row of the table at Path to each row
	Locate                      // the same, of a parameter that is no table and has Rows; others lie between these
	Resample                    // adds four weighted rows of the table at Path to each row
	Merge                       // Rows rows side by side become one
	Average                     // the average of Rows rows
	Reorder                     // the rows by an index
	Copy                        // the same elements in another order
	Crop                        // drops the rows before those of the patches
	Unfold                      // a linear module on the pixels of every patch: Path, Width
	Interpolate                 // adds rows between those of a square table at Path
	Downsample                  // a convolution that makes one row of Rows: Path, Width
	Gate                        // FeedForward
	First                       // the first row of every image
	Pool                        // a row of all of an image, by attention of Rows heads: Path, Norm, FeedForward
	Dropout                     // of elements, with the probability Share
	Pack                        // the rows of tiles side by side, the parameter at Path behind each row
)

// Step is an operation between pixels, blocks and embeddings.
type Step struct {
	Kind     StepKind
	Path     string
	Width    int64 // of a row after it
	Norm     Norm
	Function string
	Rows     int64
	Second   string
	Share    float64

	FeedForward *FeedForward
}

// Fit returns the size of an image of this size after the processor has scaled it: to full tokens, and down to the
// longer side that the encoder reads.
func (i Image) Fit(height, width int64) (_, _ int64) {
	side := i.Patch * i.Merged
	if longer := max(height, width); i.Most > 0 && longer > i.Most {
		height, width = max(1, height*i.Most/longer), max(1, width*i.Most/longer)
	}
	round := func(n int64) int64 {
		switch {
		case i.Most > 0:
			return (n + side - 1) / side * side
		case i.Usual > 0: // a convolution leaves the rest of the pixels out
			return max(1, n/side) * side
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

// Encoders returns the encoders of a multimodal model, or none.
func (n *Network) Encoders() []Encoder {
	if n.Opaque != nil {
		return n.Opaque.Encoders
	}
	var encoders []Encoder
	for _, t := range n.Towers {
		encoders = append(encoders, Encoder{t.Path, t.Projector})
	}
	return encoders
}

// PartOf returns the part of a module or a parameter.
func (n *Network) PartOf(path string) Part {
	in := func(module string) bool {
		return module != "" && (path == module || strings.HasPrefix(path, module+"."))
	}
	for _, t := range n.Encoders() {
		switch {
		case in(t.Projector):
			return Projector
		case in(t.Path), t.Path == "": // the encoder is the model
			return Vision
		}
	}
	return Language
}

// Freeze returns the model with parts that no gradient trains, but for parameters
// whose names contain one of the last strings.
func (m *Model) Freeze(parts map[Part]bool, open ...string) *Model {
	frozen := m.Clone()
	for i := range frozen.Parameters {
		p := &frozen.Parameters[i]
		p.Frozen = p.Frozen || parts[m.Network.PartOf(p.Name)] &&
			!slices.ContainsFunc(open, func(inside string) bool { return strings.Contains(p.Name, inside) })
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
			switch step.Kind {
			case Project, Unfold:
				paths = append(paths, step.Path)
			case Gate:
				paths = append(paths, step.FeedForward.Gate, step.FeedForward.Up, step.FeedForward.Down)
			case Pool:
				paths = append(paths, step.FeedForward.Up, step.FeedForward.Down)
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
