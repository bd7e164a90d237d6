package job

import (
	"math"
	"slices"
	"strconv"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/model"
	"plimsoll/internal/input/recipe/peft"
	"plimsoll/internal/plan/forward"
)

// defaultSide is the side in pixels of an image whose size nothing says.
const defaultSide = 1024

// images sets the images of a micro batch, for a model that reads images.
func (r *resolver) images() error {
	j := r.job
	towers := j.Model.Network.Towers
	if j.Model.Network.Opaque != nil && len(j.Model.Network.Encoders()) > 0 {
		return nil // whatever it reads is a part of what is not known
	}
	if len(towers) == 0 {
		if r.Request.Images != nil || r.ImageSize != "" {
			return fault.Inputf("--images and --image-size are for models that read images, but %s reads none",
				j.Model.Name).WithHint("leave them out")
		}
		return nil
	}
	if err := r.unplannedImages(); err != nil {
		return err
	}
	if j.Model.Network.OnlyImages() || j.Model.Network.Head.Contrast != nil {
		return r.oneImage(towers[0].Image)
	}
	perSequence := 1
	if r.Request.Images != nil {
		perSequence = *r.Request.Images
	} else {
		r.assume("1 image in every sequence: --images was not given")
	}
	if perSequence < 0 || int64(perSequence) > maxTokens {
		return fault.Inputf("--images is %d, expected a number from 0 to %d", perSequence, maxTokens)
	}
	height, width, err := r.imageSize(towers[0].Image, int64(perSequence))
	if err != nil || perSequence == 0 {
		return err
	}
	image, count := towers[0].Image, int64(perSequence)*j.Sequences()
	tiles, tokens := image.Cut(height, width, int64(perSequence))
	if int64(perSequence)*tokens > j.Sequence {
		return fault.Inputf("%d images of %d x %d pixels are %d tokens of a sequence, but sequences have %d",
			perSequence, height, width, int64(perSequence)*tokens, j.Sequence).
			WithHint("give a larger --seq-len, or a smaller --image-size or --images")
	}
	if image.Sizes != nil {
		r.assume("an image of %d x %d pixels is cut into %d of %d x %d", height, width, tiles, image.Height,
			image.Width)
		height, width = image.Height, image.Width
	}
	j.Images = forward.Images{Count: count * tiles, Height: height, Width: width, Tokens: count * tokens}
	return nil
}

// oneImage sets the images of a micro batch for a model that reads one at a time: alone, or with a text.
func (r *resolver) oneImage(i model.Image) error {
	j := r.job
	if n := r.Request.Images; n != nil && *n != 1 {
		return fault.Inputf("--images is %d, but %s reads one image at a time", *n, j.Model.Name).
			WithHint("give --micro-batch instead")
	}
	height, width, err := r.imageSize(i, 1)
	if err != nil {
		return err
	}
	rows := i.Patches(height, width) + i.Class
	if j.Model.Network.OnlyImages() {
		j.Sequence = rows
	}
	r.assume("every image is a sequence of %d rows: %d patches of %d x %d pixels, and %d for the whole image",
		rows, i.Patches(height, width), i.Patch, i.Patch, i.Class)
	j.Images = forward.Images{Count: j.Sequences(), Height: height, Width: width, Tokens: j.Sequences() * rows}
	return nil
}

// unplannedImages refuses and notes settings that are not planned with an encoder of images.
func (r *resolver) unplannedImages() error {
	if r.ContextParallel > 1 {
		return fault.Inputf("context parallelism is not planned for models that read images").
			WithHint("leave --context-parallel out")
	}
	if r.TensorParallel > 1 && !r.job.Model.Network.Generates() {
		return fault.Inputf("tensor parallelism is not planned for models that read images and write no text").
			WithHint("leave --tensor-parallel out")
	}
	if !r.job.Versions.Transformers.AtLeast(5, 0, 0) {
		r.assume("the encoder of images is planned as in transformers 5, and the modules have their names there")
	}
	if r.compiled() {
		r.assume("a compiled encoder of images was not compared with PyTorch")
	}
	return nil
}

// compiled reports whether torch.compile is asked for.
func (r *resolver) compiled() bool {
	return r.Compile || r.training != nil && r.training.TorchCompile || compiles(r.launch)
}

// imageSize returns height and width of an image as the encoder reads it.
func (r *resolver) imageSize(i model.Image, images int64) (height, width int64, err error) {
	if r.ImageSize != "" {
		if height, width, err = parseSize(r.ImageSize); err != nil {
			return 0, 0, err
		}
	}
	if i.Height > 0 && i.Sizes == nil {
		if height > 0 && (height != i.Height || width != i.Width) {
			hint := "leave it out; an image that is cut into tiles counts as so many --images"
			if !r.job.Model.Network.Generates() {
				hint = "leave it out; for images of another size, change image_size of config.json"
			}
			return 0, 0, fault.Inputf("--image-size is %s, but the encoder of %s reads images of %d x %d pixels",
				r.ImageSize, r.job.Model.Name, i.Height, i.Width).WithHint(hint)
		}
		text := "images of %d x %d pixels, which the encoder reads; an image that is cut into tiles counts as so many"
		if !r.job.Model.Network.Generates() {
			text = "images of %d x %d pixels, which the model reads"
		}
		r.assume(text, i.Height, i.Width)
		return i.Height, i.Width, nil
	}
	f := r.Inputs.framework
	switch {
	case height > 0:
	case f != nil && f.MostPixels > 0:
		side := int64(math.Sqrt(float64(f.MostPixels)))
		height, width = side, side
		r.assume("images of %d x %d pixels, the most that image_max_pixels allows: --image-size was not given", side,
			side)
	case i.Usual > 0:
		height, width = i.Usual, i.Usual
		r.assume("images of %d x %d pixels, which the processor makes: --image-size was not given", height, width)
	default:
		height, width = defaultSide, defaultSide
		tokens := func() int64 {
			h, w := i.Fit(height, width)
			_, tokens := i.Cut(h, w, images)
			return tokens
		}
		for height > i.Patch*i.Merged && images*tokens() > r.job.Sequence {
			height, width = height/2, width/2
		}
		r.assume("images of %d x %d pixels: --image-size was not given", height, width)
	}
	if i.Sizes == nil {
		height, width = i.Fit(height, width)
	}
	return height, width, nil
}

func parseSize(text string) (height, width int64, err error) {
	first, second, found := strings.Cut(text, "x")
	h, firstErr := strconv.ParseUint(first, 10, 16)
	w, secondErr := strconv.ParseUint(second, 10, 16)
	if !found || firstErr != nil || secondErr != nil || h == 0 || w == 0 {
		return 0, 0, fault.Inputf("--image-size is %q, expected a height and a width in pixels", text).
			WithHint("for example --image-size 768x1024")
	}
	return int64(h), int64(w), nil
}

// freezes returns the parts of a multimodal model that are not trained.
func (r *resolver) freezes() (map[model.Part]bool, error) {
	j, parts := r.job, map[model.Part]bool{}
	encoders := j.Model.Network.Encoders()
	multimodal := len(encoders) > 0
	for _, name := range r.Freeze {
		part := model.Part(name)
		if !slices.Contains(model.Parts, part) {
			return nil, fault.Inputf("--freeze has %q, expected %s", name, fault.OneOf(model.PartNames()...))
		}
		if !multimodal {
			return nil, fault.Inputf("--freeze is for models that read images, but %s reads none", j.Model.Name).
				WithHint("leave it out; with --adapter the weights of the model are frozen")
		}
		parts[part] = true
	}
	if f := r.Inputs.framework; len(r.Freeze) == 0 && f != nil && multimodal && f.Freezes.Holds(j.Model.Type) {
		t := encoders[0]
		parts[model.Vision] = f.Freezes.Vision && f.Freezes.Names(t.Path)
		parts[model.Projector] = f.Freezes.Projector && f.Freezes.Names(t.Projector)
		parts[model.Language] = f.Freezes.Language
	}
	return parts, nil
}

// freezeParts freezes parts of a multimodal model that is trained without an adapter.
func (r *resolver) freezeParts() error {
	parts, err := r.freezes()
	if err != nil || r.Inputs.adapter != nil {
		return err
	}
	j := r.job
	var names []string
	for _, part := range model.Parts {
		if parts[part] {
			names = append(names, string(part))
		}
	}
	switch len(names) {
	case 0:
		return nil
	case len(model.Parts):
		return fault.Inputf("every part of %s is frozen", j.Model.Name).WithHint("train at least one part")
	}
	var open []string
	if len(r.Freeze) == 0 {
		open = r.Inputs.framework.Freezes.Open
	}
	j.Model = j.Model.Freeze(parts, open...)
	if !slices.ContainsFunc(j.Model.Parameters, func(p model.Parameter) bool { return !p.Frozen }) {
		return fault.Inputf("%s has no parameters but frozen ones", j.Model.Name).WithHint("train at least one part")
	}
	if len(r.Freeze) == 0 {
		r.assume("%s frozen, as %s says or has as a default", strings.Join(names, " and "), r.Inputs.framework.File)
	}
	return nil
}

// adaptedParts names the modules that a framework adapts in a multimodal model:
// those of the parts that it does not freeze. An entry of LLaMA-Factory's
// lora_target means every module whose name contains it (patch_target_modules in
// model/model_utils/visual.py, find_all_linear_modules in misc.py).
func (r *resolver) adaptedParts(a *peft.Adapter) (*peft.Adapter, error) {
	f, network := r.Inputs.framework, r.job.Model.Network
	frozen, err := r.freezes()
	if err != nil || f == nil || len(network.Encoders()) == 0 || !f.Freezes.Holds(r.job.Model.Type) {
		return a, err
	}
	var modules, names []string
	if !f.Freezes.Contained {
		for _, path := range network.Linears() {
			if a.Targets(path) && !frozen[network.PartOf(path)] {
				modules = append(modules, path)
			}
		}
		return a.Naming(modules), nil
	}
	for _, path := range network.Linears() {
		part := network.PartOf(path)
		if a.AllLinear() && part != model.Projector && !(part == model.Vision && frozen[part]) || a.NamesWithin(path) {
			names = append(names, path[strings.LastIndexByte(path, '.')+1:])
		}
	}
	for _, path := range network.Linears() {
		within := func(name string) bool { return strings.Contains(path, name) }
		if !frozen[network.PartOf(path)] && slices.ContainsFunc(names, within) {
			modules = append(modules, path)
		}
	}
	return a.Naming(modules), nil
}
