package foreign

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/base/pickle"
	"plimsoll/internal/input/model"
	"plimsoll/internal/state/checkpoint"
)

// weight is a parameter in a file of a trainer.
type weight struct {
	shape []int64
	at    checkpoint.Numbers
}

// maxNames is far above the size of a list of names.
const maxNames = 64 << 20

var weightsKind = kind{
	"file of weights",
	"name files of safetensors, or of torch.save with the state_dict of the model",
}

// readNames reads a list of the names of parameters.
func readNames(path string) ([]string, error) {
	if path == "" {
		return nil, nil
	}
	text, err := files.Read(path, maxNames)
	if err != nil {
		return nil, checkpoint.Cause(path, "the names of the parameters cannot be read", errors.Unwrap(err))
	}
	var names []string
	if err := json.Unmarshal(text, &names); err != nil || len(names) == 0 {
		return nil, fault.File(path).Inputf(`expected a JSON list of the names of parameters, such as ["a.weight"]`).
			WithHint("docs/checkpoints.md shows how to write it")
	}
	return names, nil
}

// readWeights finds the parameters in files of safetensors and torch.save.
func readWeights(ctx context.Context, paths []string, progress func(bytes int64)) (map[string]weight, error) {
	all := map[string]weight{}
	for _, path := range paths {
		own, err := weightsIn(ctx, path, progress)
		if err != nil {
			return nil, err
		}
		for name, w := range own {
			if _, twice := all[name]; twice {
				return nil, weightsKind.wrong(path, "an earlier file has %q, too", name)
			}
			all[name] = w
		}
	}
	return all, nil
}

func weightsIn(ctx context.Context, path string, progress func(bytes int64)) (map[string]weight, error) {
	isArchive, err := beginsAsArchive(path)
	if err != nil {
		return nil, err
	}
	if isArchive {
		own := map[string]weight{}
		err := withArchive(ctx, path, weightsKind, nil, progress, func(a *archive, document any) error {
			for name, value := range byKey[string](document) {
				if err := a.addWeight(own, name, value); err != nil {
					return fmt.Errorf("%q: %w", name, err)
				}
			}
			return nil
		})
		return own, err
	}
	tensors, err := model.SavedTensors(path)
	if err != nil {
		return nil, err
	}
	own := map[string]weight{}
	for _, t := range tensors {
		switch at := (checkpoint.Location{Path: path, Offset: t.Offset}); t.Type {
		case dtype.F32:
			own[t.Name] = weight{t.Shape, at}
		case dtype.BF16:
			own[t.Name] = weight{t.Shape, bfloat16(at)}
		}
	}
	return own, nil
}

// addWeight adds a tensor in fp32 or bf16. Others, such as the integers of buffers, are no parameters.
func (a *archive) addWeight(own map[string]weight, name string, value any) error {
	tensor, ok := value.(pickle.Tensor)
	if !ok || tensor.Kind != "FloatStorage" && tensor.Kind != "BFloat16Storage" {
		return nil
	}
	at, err := a.momentOf(tensor, tensor.Shape)
	own[name] = weight{tensor.Shape, at}
	return err
}

// beginsAsArchive tells whether a file is of torch.save.
func beginsAsArchive(path string) (bool, error) {
	file, _, err := files.Open(path)
	if err != nil {
		return false, checkpoint.Cause(path, "this is no "+weightsKind.name, errors.Unwrap(err))
	}
	defer file.Close()
	var begin [4]byte
	_, err = file.ReadAt(begin[:], 0)
	return err == nil && string(begin[:]) == "PK\x03\x04", nil
}
