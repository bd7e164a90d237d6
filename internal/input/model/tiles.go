package model

import (
	"strconv"

	"plimsoll/internal/input/recipe/strict"
)

// tiled adds a parameter between the rows of an image, which a processor cuts into tiles. The image is fitted into
// the best of some sizes. If most is above 0, an image alone in its sequence is cut, and its rows are scaled down to
// those of so many tiles.
func tiled(describe func(root, v scope, hidden int64), sizes [][2]int64, most int64) func(scope, scope, int64) {
	return func(root, v scope, hidden int64) {
		root.tensor("model.image_newline", hidden)
		describe(root, v, hidden)
		t := root.network.Towers[len(root.network.Towers)-1]
		t.After = append(t.After, Step{Kind: Pack, Path: "model.image_newline"})
		t.Image.Sizes, t.Image.MostTiles = sizes, most
		if list := root.list("image_grid_pinpoints"); list != nil {
			t.Image.Sizes = nil
			for _, v := range list {
				t.Image.Sizes = append(t.Image.Sizes, root.pair("image_grid_pinpoints", v))
			}
		}
		if root.textOr("anyres_max_9", "vision_aspect_ratio") != "anyres_max_9" {
			root.fail(root.fields["vision_aspect_ratio"].Value.At, Documented,
				`vision_aspect_ratio is not "anyres_max_9", which is not planned`)
		}
	}
}

// pair returns the two sizes of an element of a list.
func (s scope) pair(name string, v *strict.Value) [2]int64 {
	var pair [2]int64
	ok := v.Kind == '[' && len(v.Elements) == len(pair)
	for i := range pair {
		if ok {
			n, err := strconv.ParseInt(v.Elements[i].Text, 10, 32)
			pair[i], ok = n, err == nil && n > 0
		}
	}
	if !ok {
		s.fail(v.At, "", "%s has %s: expected a height and a width in pixels", name, v)
		return [2]int64{1, 1}
	}
	return pair
}

// nextSizes are those that LLaVA-NeXT fits images into by default.
var nextSizes = [][2]int64{{336, 672}, {672, 336}, {672, 672}, {1008, 336}, {336, 1008}}

// oneVisionSizes are those of LLaVA-OneVision.
func oneVisionSizes() [][2]int64 {
	var sizes [][2]int64
	for height := int64(384); height <= 2304; height += 384 {
		for width := int64(384); width <= 2304; width += 384 {
			sizes = append(sizes, [2]int64{height, width})
		}
	}
	return sizes
}
