//go:build linux

package service

import (
	"context"
	"fmt"
	"os"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/arena"
	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/optim"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/service/protocol"
	"plimsoll/internal/state/shard"
)

// designShard returns the design of a shard.
func (s *Server) designShard(d *protocol.Document, cpus []int, sums bool, window engine.Window) (*design, error) {
	config, err := shardConfig(d, s.kernel, arena.BasePages, cpus)
	if err != nil {
		return nil, protocol.Refused.Errorf("%v", err)
	}
	config.Sums = sums
	onTier, err := s.putOnTier(d, &config, window)
	if err != nil {
		return nil, err
	}
	if config.Retracts {
		if err := config.MayRetract(); err != nil {
			return nil, protocol.Refused.Errorf("retracts is true: %v", err)
		}
	}
	return &design{
		document: d, arenas: config.Arenas(), tier: onTier, workers: len(cpus),
		what:    fmt.Sprintf("the state of %d parameters in %v", config.Elements, config.Format),
		smaller: `a smaller format (moments "bf16" or "int8")`,
		make: func(of *session) (func() error, error) {
			config.Pages, config.Place = of.pages, of.place
			shard, err := engine.NewShard(config)
			if err != nil {
				return nil, err
			}
			held := newHeldShard(of, shard)
			return func() error {
				shard.Populate(context.Background(), func(ledger.Bytes) {})
				held.endScrubbing = held.startScrubbing()
				return held.restoreFromTier()
			}, nil
		},
		attach: func(of *session, files map[string]*os.File) error {
			config.Pages, config.Place = of.pages, of.place
			shard, err := engine.AttachShard(config, files)
			if err == nil {
				held := newHeldShard(of, shard)
				held.finish()
				held.endScrubbing = held.startScrubbing()
			}
			return err
		},
	}, nil
}

// shardConfig returns the configuration of the shard.
func shardConfig(d *protocol.Document, set kernel.Set, pages arena.Pages, cpus []int) (engine.ShardConfig, error) {
	format, err := d.Format()
	if err != nil {
		return engine.ShardConfig{}, err
	}
	layout, err := shard.NewLayout(format, shard.DefaultChunk, shard.Sections(piecesOf(d)))
	return engine.ShardConfig{Rank: d.Rank, Part: d.SessionPart(), Layout: layout, Journal: true, Kernel: set,
		Pages: pages, CPUs: cpus, Retracts: d.Retracts}, err
}

// piecesOf returns the parameters in the form in which shards are laid out.
func piecesOf(d *protocol.Document) []shard.Piece {
	pieces := make([]shard.Piece, len(d.Parameters))
	for i, p := range d.Parameters {
		pieces[i] = shard.Piece{Name: p.Name, Shape: p.Shape, Group: p.Group,
			Range: shard.Range{First: p.First, Count: p.Count}, Moments: d.MomentsOf(p)}
	}
	return pieces
}

// optimizerOf returns the optimizer of a parameter group in a step, with the numbers of
// the request.
func optimizerOf(d *protocol.Document, x protocol.Hyperparameters) optim.Optimizer {
	rule, _ := optim.ParseRule(d.Optimizer) // was validated
	return rule.With(optim.Hyperparameters{
		LearningRate: x[0], Beta1: x[1], Momentum: x[1], Beta2: x[2], Epsilon: x[3], WeightDecay: x[4],
		LearningRateDecay: x[5], Dampening: x[5], Nesterov: x[6] != 0,
	})
}
