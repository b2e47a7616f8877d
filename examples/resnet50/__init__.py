"""The parts of resnet50_imagenet.py."""
