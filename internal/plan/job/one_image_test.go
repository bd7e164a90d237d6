package job

import (
	"strings"
	"testing"

	"plimsoll/internal/plan/forward"
)

// TestOneImage decides jobs of models that read one image at a time, and no tokens or a text.
func TestOneImage(t *testing.T) {
	one, two := 1, 2
	const variants = "../../input/model/testdata/variants/"
	for name, test := range map[string]struct {
		request  Request
		want     forward.Images
		sequence int64
		refused  string
	}{
		"ViT": {request: Request{Model: "vit"}, sequence: 257,
			want: forward.Images{Count: 3, Height: 64, Width: 64, Tokens: 771}},
		"DeiT": {request: Request{Model: "deit", Images: &one}, sequence: 258,
			want: forward.Images{Count: 3, Height: 64, Width: 64, Tokens: 774}},
		"DINOv2": {request: Request{Model: "dinov2-swiglu"}, sequence: 257,
			want: forward.Images{Count: 3, Height: 224, Width: 224, Tokens: 771}},
		"DINOv2 of another size": {request: Request{Model: "dinov2", ImageSize: "100x300"}, sequence: 148,
			want: forward.Images{Count: 3, Height: 98, Width: 294, Tokens: 444}},
		"CLIP": {request: Request{Model: "clip", Sequence: 77}, sequence: 77,
			want: forward.Images{Count: 3, Height: 128, Width: 128, Tokens: 771}},
		"long texts":      {request: Request{Model: "siglip", Sequence: 300}, refused: "positions for only 256"},
		"tokens":          {request: Request{Model: "vit", Sequence: 512}, refused: "reads images only"},
		"several":         {request: Request{Model: "vit", Images: &two}, refused: "reads one image at a time"},
		"another size":    {request: Request{Model: "vit", ImageSize: "32x32"}, refused: "reads images of 64 x 64"},
		"nothing trained": {request: Request{Model: "dinov2-bare", Freeze: []string{"vision"}}, refused: "frozen ones"},
		"tensor parallel": {request: Request{Model: "clip", GPUs: 2, TensorParallel: 2}, refused: "tensor parallelism"},
		"pipeline":        {request: Request{Model: "vit", GPUs: 2, PipelineParallel: 2}, refused: "pipeline stages"},
		"Adam-mini":       {request: Request{Model: "vit", Optimizer: "adam-mini"}, refused: "no heads of attention"},
		"no images":       {request: Request{Model: "whisper", Images: &one}, refused: "reads none"},
		"long labels":     {request: Request{Model: "whisper", Sequence: 300}, refused: "positions for only 256"},
		"sound in parts":  {request: Request{Model: "whisper", GPUs: 2, TensorParallel: 2}, refused: "read sound"},
	} {
		t.Run(name, func(t *testing.T) {
			q := test.request
			q.Model, q.MicroBatch = variants+q.Model+".json", 3
			j, err := q.Resolve()
			switch {
			case test.refused != "":
				if err == nil || !strings.Contains(err.Error(), test.refused) {
					t.Errorf("got %v, want %q", err, test.refused)
				}
			case err != nil:
				t.Error(err)
			case j.Images != test.want || j.Sequence != test.sequence:
				t.Errorf("got %+v and %d, want %+v and %d", j.Images, j.Sequence, test.want, test.sequence)
			}
		})
	}
}
